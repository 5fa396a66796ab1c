"""The figures of pages in docs."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from figures_reading import Row, decode, numbers, ropes, row, rows, span, table, wrapped

_DECLARATION = ("batch", "heads", "heads_kv", "queries", "keys", "depth", "mask")
_GATE_SUBJECTS = ("attention", "then a gate", "gated")


def attention() -> str:
    """The forward of attention in the Triton engine beside PyTorch's and cuDNN's."""
    dense = rows("attention", kind="dense", who="tilewright triton")
    cases = sorted({(int(each["depth"]), int(each["length"])) for each in dense})
    kinds = [
        (f"head size {depth}, {length}", {"kind": "dense", "depth": depth, "length": length})
        for depth, length in (map(str, case) for case in cases)
    ]
    packed = rows("attention", kind="ragged", who="tilewright triton")[0]["length"]
    name = f"packed, 64k tokens, {packed.replace(' of', ' sequences of', 1)}"
    kinds.append((name, {"kind": "ragged", "length": packed}))
    return table(
        ("case, full / causal", "Triton engine", "PyTorch flash", "cuDNN", "of cuDNN"),
        ((name, *_both_masks(wanted)) for name, wanted in kinds),
    )


def _both_masks(wanted: Row) -> Iterator[str]:
    masks = [rows("attention", **wanted, mask=mask) for mask in ("none", "causal")]
    for peers in (("tilewright triton",), ("torch flash",), ("torch cudnn", "cudnn front end")):
        best = (max(numbers((r for r in found if r["who"] in peers), "rate")) for found in masks)
        yield " / ".join(f"{rate:.0f}" for rate in best)
    yield " / ".join(
        each["of_cudnn"] for found in masks for each in found if each["who"] == "tilewright triton"
    )


def window() -> str:
    """A window beside the whole triangle."""
    ours, flash = (
        row("attention", kind="window", mask="window 1024", who=who)
        for who in ("tilewright triton", "torch flash")
    )
    times = Decimal(flash["ms"]) / Decimal(ours["ms"])
    return wrapped(
        f"A window of 1024 of 16,384 keys, head size 128, takes {Decimal(ours['ms']):.2f} "
        f"milliseconds, {times:.1f} times as fast as PyTorch's flash, and {ours['of_visible']} of "
        "its visible fraction of the triangle's time."
    )


def plans() -> str:
    """How the first plans of attention came out beside the quickest ones, and the model's error."""
    found = rows("attention_plans")
    firsts: dict[tuple[str, ...], Decimal] = {}
    for each in found:
        declaration = tuple(each[column] for column in _DECLARATION)
        firsts.setdefault(declaration, Decimal(each["of_best"]))
    ratios = [Decimal(each["model_us"]) / Decimal(each["us"]) for each in found]
    off = max(max(ratio, 1 / ratio) for ratio in ratios)
    mean = sum(firsts.values()) / len(firsts)
    return wrapped(
        f"`benchmark/attention_plans.py` sets the model beside the times of all plans "
        f"(`attention_plans.csv`): in {len(firsts)} declarations the plan that is put first takes "
        f"{mean:.2f} of the quickest one's time on average, {max(firsts.values()):.2f} at most, "
        f"and the model is off by a factor of {off:.1f} at most."
    )


def decoding() -> str:
    """Decoding, in bytes that have to be read."""
    lines = []
    for length in ("4096", "32768"):
        kinds = {
            "even": length,
            "uneven": f"{length} at most, uneven",
            "quarter": f"{length} declared, a quarter there",
        }
        for mask, name in kinds.items():
            found = rows("attention", kind="decode", length=length, mask=mask)
            rates = {each["who"]: Decimal(each["rate"]) for each in found}
            pages = (
                f"{Decimal(decode(length, f'{mask}, page {size}')['rate']):.2f}"
                for size in (128, 16)
            )
            cudnn = [rates[who] for who in ("torch cudnn", "cudnn front end") if who in rates]
            flash = f"{rates['torch flash']:.2f}" if "torch flash" in rates else ""
            best = f"{max(cudnn):.2f}" if cudnn else ""
            ours, copy = (f"{rates[who]:.2f}" for who in ("tilewright triton", "torch copy"))
            lines.append((name, ours, " / ".join(pages), flash, best, copy))
    head = ("keys", "Triton engine", "pages of 128 / 16", "PyTorch flash", "cuDNN", "copy")
    return table(head, lines)


def gate() -> str:
    """Attention, a gate in a kernel of its own behind it, and the gated plan, in microseconds."""
    cases: dict[str, dict[str, list[str]]] = {}
    for each in rows("attention_gate"):
        name = f"head size {each['depth']}, "
        if each["queries"] == "1":
            name = f"decoding {each['batch']} sequences of {each['keys']} keys"
        elif each["queries"] == "4096":
            name += "full / causal"
        else:
            name += f"sequences of {each['queries']}, {each['mask']}"
        us = Decimal(each["us"])
        text = f"{us:.1f}" if us < 100 else f"{us:.0f}"
        cases.setdefault(name, {}).setdefault(each["who"], []).append(text)
    return table(
        ("case", "attention", "then a generated kernel", "gated plan"),
        (
            (name, *(" / ".join(found[f"triton, {who}"]) for who in _GATE_SUBJECTS))
            for name, found in cases.items()
        ),
    )


def rope() -> str:
    """Shares of a copy's rate."""
    layouts = {
        "BSHD": "heads of a token next to one another (BSHD)",
        "BHSD": "tokens of a head next to one another (BHSD)",
    }
    return table(
        ("", "R / 2 angles", "R angles with equal halves"),
        (
            (name, *(span(ropes(layout, angles)) for angles in (", R/2 angles", ", R angles")))
            for layout, name in layouts.items()
        ),
    )


def pointwise() -> str:
    """Shares of a copy's rate."""
    names = {
        "seven operations": "scale, bias, swish, a factor, a summand, max, min: seven operations",
        "seven operations, residual": "seven operations with gelu and a residual",
    }
    graphs = dict.fromkeys(each["graph"] for each in rows("pointwise"))
    return table(
        ("graph", "here", "torch.compile"),
        (
            (
                names.get(graph, graph),
                *(
                    f"{Decimal(row('pointwise', graph=graph, subject=subject)['of_copy']):.2f}"
                    for subject in ("tilewright", "torch.compile")
                ),
            )
            for graph in graphs
        ),
    )
