"""Host time of the functions around their plans: of a call that is checked, and of one like it.

    OMP_NUM_THREADS=1 python benchmark/functions_cpu.py

Plans do not run: what is left is what a function does for a call on any device. The two ways take
turns, and the least of the rounds counts, since other work of a machine only adds. Writes
benchmark/results/cpu/functions.csv.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from results import Table

from tilewright import ops
from tilewright.ops import plan_cache
from tilewright.ops.attention_repeat import Arguments
from tilewright.ops.repeats import Repeats

CALLS, ROUNDS = 500, 40
B, H, H_KV, KEYS, D, PAGE = 2, 8, 2, 64, 16, 16


def functions() -> dict[str, Callable[[], Any]]:
    """A call of each function."""
    q, new = torch.randn(B, H, KEYS, D), torch.randn(B, H, 1, D)
    k, v = (torch.randn(B, H_KV, KEYS, D) for _ in range(2))
    rows, keys, values = (torch.randn(B * KEYS, heads, D) for heads in (H, H_KV, H_KV))
    of_rows, of_keys = (torch.arange(B + 1, dtype=torch.int32) * KEYS for _ in range(2))
    pages = [torch.randn(B * KEYS // PAGE, PAGE, H_KV, D) for _ in range(2)]
    table = torch.arange(B * KEYS // PAGE, dtype=torch.int32).view(B, -1)
    lengths = torch.full((B,), KEYS, dtype=torch.int32)
    x, weight, bias = torch.randn(4, D), torch.randn(D), torch.randn(D)
    return {
        "sdpa": lambda: ops.sdpa(q, k, v, causal=True),
        "sdpa_decode": lambda: ops.sdpa_decode(new, k, v, lengths),
        "sdpa_varlen": lambda: ops.sdpa_varlen(rows, keys, values, of_rows, of_keys, KEYS, KEYS),
        "sdpa_paged": lambda: ops.sdpa_paged(new, *pages, table, lengths),
        "rms_norm": lambda: ops.rms_norm(x, weight),
        "layer_norm": lambda: ops.layer_norm(x, weight, bias),
    }


@contextlib.contextmanager
def forgetful() -> Iterator[None]:
    """No call is like an earlier one, and none is remembered."""
    with (
        mock.patch.multiple(Repeats, find=lambda *_: None, keep=lambda *_: None),
        mock.patch.object(Arguments, "remember", lambda *_: None),
    ):
        yield


def microseconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - began) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    table = Table("functions", "OMP_NUM_THREADS=1 python benchmark/functions_cpu.py")
    with torch.no_grad():
        for name, call in functions().items():
            call()
            call()
            checked, repeated = [], []
            with mock.patch.object(plan_cache, "_run_built", lambda *_: None):
                for _ in range(ROUNDS):
                    repeated.append(microseconds(call))
                    with forgetful():
                        checked.append(microseconds(call))
            slow, fast = min(checked), min(repeated)
            times = {"checked_us": f"{slow:.2f}", "repeated_us": f"{fast:.2f}"}
            table.add(function=name, **times, ratio=f"{slow / fast:.2f}")
    table.write()


if __name__ == "__main__":
    main()
