"""How long a kernel takes that only reads, beside a copy of as many bytes in all.

    python benchmark/reading_gpu.py

The amounts are those that decoding reads in ``attention_gpu.py``: at 4096 and 32,768 keys, uneven
lengths and even ones. A copy of n bytes reads n / 2 and writes n / 2. Kernels read each word once,
mark it to leave the cache first, and store nothing; they differ in words a block, warps, programs a
multiprocessor, and blocks under way (1: in registers; more: by asynchronous copies to shared
memory). Microseconds with a cold L2, medians of interleaved rounds; ``of_copy`` is the copy's time
over a kernel's. Writes benchmark/results/<device>/reading.csv.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from attention_gpu import DECODE, SHARES
from results import Table
from timing import Call, device_ms

# (words a block, warps, programs a multiprocessor, blocks under way)
READERS = (
    (4096, 4, 4, 1),
    (4096, 4, 8, 1),
    (8192, 8, 4, 1),
    (8192, 8, 8, 1),
    (2048, 4, 8, 3),
    (4096, 4, 4, 3),
    (8192, 8, 2, 3),
    (8192, 8, 1, 6),
)
ROUNDS = 25
# What words are not, so that nothing is stored.
_NEVER = tl.constexpr(123456789)


@triton.jit
def read_words(words, out, blocks, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        found ^= tl.load(words + at, eviction_policy="evict_first")
    if tl.max(found, 0) == _NEVER:
        tl.store(out + tl.program_id(0), 1)


def measure(table: Table, length: int, kind: str) -> None:
    keys = sum(int(length * share) for share in SHARES[kind])
    count = keys * DECODE["heads_kv"] * DECODE["depth"] * 2 * 2
    # Whole blocks of every size; what is left out is less than a thousandth.
    count = count // (8192 * 4) * (8192 * 4)
    words = torch.zeros(count // 4, dtype=torch.int32, device="cuda")
    source = torch.empty(count // 2, dtype=torch.uint8, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    out = torch.zeros(8 * programs, dtype=torch.int32, device="cuda")
    calls: dict[str, Call] = {
        "torch copy": functools.partial(torch.empty_like(source).copy_, source),
        "a kernel that does nothing": functools.partial(
            read_words[(programs,)], words, out, 0, BLOCK=1024, STAGES=1
        ),
    }
    for block, warps, share, stages in READERS:
        name = f"{block} words, {warps} warps, {share} programs, {stages} under way"
        calls[name] = functools.partial(
            read_words[(share * programs,)],
            words,
            out,
            count // 4 // block,
            BLOCK=block,
            STAGES=stages,
            num_warps=warps,
        )
    times = device_ms(calls, rounds=ROUNDS)
    for name, ms in times.items():
        of_copy = f"{times['torch copy'] / ms:.3f}"
        table.add(length=length, mask=kind, mb=count // 10**6, who=name, us=f"{1e3 * ms:.1f}",
                  of_copy=of_copy if name != "a kernel that does nothing" else "")  # fmt: skip


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("reading_gpu.py needs a GPU")
    table = Table("reading", "python benchmark/reading_gpu.py")
    for length in (4096, 32768):
        for kind in ("uneven", "even"):
            measure(table, length, kind)
    table.write()


if __name__ == "__main__":
    main()
