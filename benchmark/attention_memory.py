"""Memory that one attention call adds: (1, 8, 8192, 64) float32, causal, a window of 1024 keys.

    OMP_NUM_THREADS=1 python benchmark/attention_memory.py

measures each way of computing it in a fresh process and writes
benchmark/results/cpu/attention_memory.csv. Added memory is the process's peak resident size after
the call (`ru_maxrss`) less its resident size before it, output included; a smaller call before that
has loaded the libraries. The scores as a whole would take 2 GiB. The exit status is 1 if ours adds
more than LIMIT_MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HEADS, LENGTH, DEPTH, WINDOW = 8, 8192, 64, 1024
LIMIT_MB = 300
WARM_UP_LENGTH = 256
RESULTS = Path(__file__).resolve().parent / "results/cpu"
WAYS = {
    "tilewright.ops.sdpa(causal, window)": "ours",
    "scaled_dot_product_attention(boolean mask)": "masked",
    "scaled_dot_product_attention(is_causal), no window": "causal",
}


def call(way: str, q: Any, k: Any, v: Any) -> Any:
    import torch

    if way == "ours":
        from tilewright import ops

        # Row i sees keys i - 1023 to i: 1024 of them.
        return ops.sdpa(q, k, v, causal=True, window=(WINDOW - 1, 0))
    attention = torch.nn.functional.scaled_dot_product_attention
    if way == "causal":
        return attention(q, k, v, is_causal=True)
    row = torch.arange(q.shape[2])[:, None]
    column = torch.arange(k.shape[2])[None, :]
    return attention(q, k, v, attn_mask=(column <= row) & (column > row - WINDOW))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(way: str, q: Any, k: Any, v: Any, out: Any) -> None:
    """Some rows against the formula in float64."""
    import torch

    for head, row in ((0, 0), (3, 700), (5, 5000), (7, LENGTH - 1)):
        first = 0 if way == "causal" else max(0, row - WINDOW + 1)
        keys, values = k[0, head, first : row + 1].double(), v[0, head, first : row + 1].double()
        weights = torch.softmax(keys @ q[0, head, row].double() * DEPTH**-0.5, 0)
        torch.testing.assert_close(out[0, head, row].double(), weights @ values, atol=1e-5, rtol=0)


def child(way: str) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, DEPTH, generator=generator) for _ in range(3))
    call(way, *(tensor[:, :, :WARM_UP_LENGTH] for tensor in (q, k, v)))
    before = resident_bytes()
    start = time.perf_counter()
    out = call(way, q, k, v)
    seconds = time.perf_counter() - start
    after = peak_bytes()
    check(way, q, k, v, out)
    print(json.dumps({"before": before, "after": after, "seconds": seconds}))


def measure(way: str) -> dict[str, float]:
    # This process stays small: a child's ru_maxrss starts from its parent's.
    done = subprocess.run(
        [sys.executable, __file__, "--child", way], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{way}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def header() -> list[str]:
    code = (
        "import json; from tilewright.cli import machine; "
        "print(json.dumps([machine.describe_cpu(), machine.versions()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    device, versions = json.loads(done.stdout)
    return [
        f"# device: {device}",
        f"# versions: {', '.join(f'{name} {v}' for name, v in versions.items() if v)}",
        "# command: python benchmark/attention_memory.py",
        f"# case: (1, {HEADS}, {LENGTH}, {DEPTH}) float32, causal, window of {WINDOW} keys",
    ]


def main() -> int:
    lines = [*header(), "call,added_mb,seconds"]
    added = {}
    for name, way in WAYS.items():
        found = measure(way)
        added[way] = (found["after"] - found["before"]) / 1e6
        lines.append(f'"{name}",{added[way]:.1f},{found["seconds"]:.2f}')
    text = "\n".join(lines) + "\n"
    print(text, end="")
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "attention_memory.csv").write_text(text, encoding="utf-8")
    return 1 if added["ours"] > LIMIT_MB else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", choices=sorted(WAYS.values()), help=argparse.SUPPRESS)
    chosen = parser.parse_args().child
    sys.exit(child(chosen) if chosen else main())
