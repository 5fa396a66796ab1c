"""Every planted bug is found, by the rule that it breaks; the right kernels pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.L0
Verify = Callable[..., Any]

# The bug -> the case that shows it, the rules that break there, and words of the evidence.
ATTENTION = {
    "narrow_stride": ("grouped heads", {"L4"}, "q with a stride of"),
    "unmasked_tail": ("grouped heads", {"values"}, "zeros up to a multiple of 16"),
    "missed_head": ("grouped heads", {"values"}, "query head h reads KV head h % Hkv"),
    "wrong_log": ("Stats", {"values"}, "Stats is in base 2"),
    "stale_scale": ("scale in a tensor", {"L9"}, "result is that of the old values"),
    "unwritten_rows": ("grouped heads", {"values", "L11"}, "8 of 40 rows"),
}
NORM = {
    "narrow_stride": ("rows of 19", {"L4"}, "x with a stride of"),
    "unmasked_tail": ("rows of 19", {"values"}, "over a multiple of 16 elements"),
    "unwritten_rows": ("rows of 19", {"values", "L11"}, "3 of 15 rows"),
}
PLANTED = [
    *(("attention", "attention", bug, *facts) for bug, facts in ATTENTION.items()),
    *(("rms_norm", "rms_norm", bug, *facts) for bug, facts in NORM.items()),
]


@pytest.mark.parametrize(("family", "kernel", "bug", "case", "rules", "words"), PLANTED)
def test_each_bug_is_found_by_its_rule(
    verify: Verify, family: str, kernel: str, bug: str, case: str, rules: set[str], words: str
) -> None:
    target = f"examples.verify.planted:{kernel}_{bug}"
    ran = verify(family, "--target", target, "--case", case)
    assert ran.code == 1
    assert ran.rules("broken") == rules
    assert any(words in check["text"] for check in ran.checks("broken"))
    assert "broken:" in ran.out


def test_every_bug_of_the_example_is_here() -> None:
    from examples.verify import planted

    named = {name for name in vars(planted) if name.startswith(("attention_", "rms_norm_"))}
    assert named == {f"{kernel}_{bug}" for _, kernel, bug, *_ in PLANTED}
    assert set(planted.BUGS) == set(ATTENTION)


@pytest.mark.parametrize("family", ["attention", "rms_norm"])
def test_the_right_kernel_passes_everything(verify: Verify, family: str) -> None:
    ran = verify(family, "--target", f"examples.verify.planted:{family}")
    assert ran.code == 0, ran.out
    assert ran.checks("broken") == []
    assert {"L1", "L4", "L6", "L10", "L11", "same", "values"} <= ran.rules("held")
    if family == "attention":
        assert "L9" in ran.rules("held")


def test_no_bug_shows_on_random_inputs_of_friendly_shapes() -> None:
    import torch

    from examples.verify import planted

    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 4, 16, 16, generator=generator) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for bug in planted.BUGS:
        found = getattr(planted, f"attention_{bug}")(q, k, v)
        assert torch.allclose(found, expected, atol=1e-5), bug
    x, weight = torch.randn(4, 64, generator=generator), torch.ones(64)
    for bug in NORM:
        found = getattr(planted, f"rms_norm_{bug}")(x, weight)
        assert torch.allclose(found, torch.nn.functional.rms_norm(x, (64,), weight), atol=1e-4)


# One interpreter for all of them: each start costs seconds.
INTERPRETED = """
import sys
from tilewright.cli.main import main
for number in range(1, len(sys.argv), 2):
    name, case = sys.argv[number], sys.argv[number + 1]
    arguments = ["--case", case] if case else []
    print(name, main(["verify", "attention", "--target", name, "--brief", *arguments]), flush=True)
"""


def test_the_triton_kernel_is_caught_in_the_interpreter(interpreted: Callable[..., Any]) -> None:
    module = "examples.verify.planted_triton:attention"
    arguments = [module, "Stats"]
    for bug, (case, _, _) in ATTENTION.items():
        arguments += [f"{module}_{bug}", case]
    done = interpreted("-c", INTERPRETED, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert f"{module} 0\n" in out
    for bug, (_, rules, words) in ATTENTION.items():
        before, found, _ = out.partition(f"{module}_{bug} 1\n")
        assert found, f"{bug} was not found:\n{out}"
        own = before.rpartition("declined\n" + module)[2]
        assert words in own
        for rule in rules:
            assert f": {rule} (" in own


def test_a_stale_scale_is_stale_only_where_one_changes() -> None:
    # Many short-lived scales: a new one may have the address of one that is gone.
    from examples.verify import planted

    q = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(3))
    for step in range(200):
        scale = torch.tensor(0.1 + 0.01 * step)
        wrong, right = (
            attention(q, q, q, scale=scale)
            for attention in (planted.attention_stale_scale, planted.attention)
        )
        assert torch.equal(wrong, right), step
        del scale
