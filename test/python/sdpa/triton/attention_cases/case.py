"""One attention case: a level for each factor. Plain text and numbers, so that it prints whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Case:
    """Levels of every factor. ``rows`` and ``keys`` and below do not change the compiled code."""

    dtype: str = "bfloat16"
    heads: tuple[int, int] = (2, 2)
    sizes: tuple[int, int] = (64, 64)
    layout: str = "bhsd"
    band: str = "open"
    lengths: str = "none"
    place: str = "dense"
    bias: str = "none"
    alibi: bool = False
    block_mask: bool = False
    sink: str = "none"
    soft_cap: str = "none"
    dropout: str = "none"
    stats: str = "none"
    scale: str = "number"
    values: str = "normal"
    index: str = "int32"
    out: str = "same"
    # What follows does not change the compiled code.
    rows: int = 40
    keys: int = 50
    batch: int = 2
    seed: int = 0

    def __str__(self) -> str:
        plain = Case()
        return ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        )


# Plain levels first: a case with few special levels is easier to read.
LEVELS: dict[str, tuple[object, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "sizes": (
        *((64, 64), (128, 128), (16, 16), (96, 96), (256, 256), (192, 128), (40, 72), (13, 5)),
        *((24, 72), (72, 24)),
    ),
    "layout": ("bhsd", "bshd", "gaps", "stepped", "expanded"),
    "band": ("open", "causal", "bottom_right", "window", "band", "band_bottom_right"),
    "lengths": ("none", "lengths", "sums"),
    "place": ("dense", "ragged", "ragged_kv", "paged_1", "paged_16", "paged_48"),
    "bias": ("none", "full", "keys", "rows", "heads", "hiding"),
    "alibi": (False, True),
    "block_mask": (False, True),
    "sink": ("none", "float32", "same"),
    "soft_cap": ("none", "mul", "div", "bare"),
    "dropout": ("none", "philox", "philox_device", "mask"),
    "stats": ("none", "natural", "log2", "all"),
    "scale": ("number", "negative", "host", "device"),
    "values": ("normal", "hidden_nan", "large"),
    "index": ("int32", "int64"),
    "out": ("same", "float32"),
}
SMALL_EXTENTS = ((1, 1), (5, 2), (2, 5), (17, 33), (40, 50), (33, 70), (64, 64), (20, 129))
LARGE_EXTENTS = (
    *((1, 1), (5, 2), (2, 5), (64, 64), (128, 128), (129, 127), (100, 300), (300, 100)),
    *((257, 511), (1, 700), (16, 640), (384, 384)),
)
# Extents that one compiled kernel serves: more rows than the smaller tiles are for, and few.
MANY_ROWS = tuple(
    (rows, keys) for rows in (65, 100, 127, 128, 129, 190) for keys in (2, 63, 64, 65, 130, 333)
)
FEW_KEYS = (300, 321, 383, 384, 385, 450, 511, 512, 513, 640, 700, 999)
# The same of the backward's kernels, whose code tells whole tiles from others.
UNEVEN_ROWS = (65, 100, 127, 129, 190, 257)
UNEVEN_KEYS = (65, 100, 130, 333)


def legal(case: Case) -> Case:
    """The nearest case that may be declared: one factor yields to another."""
    if case.place != "dense" and case.lengths == "none":
        case = replace(case, lengths="lengths")
    if case.place == "dense" and case.index != "int32" and case.lengths == "none":
        case = replace(case, index="int32")
    if case.values == "hidden_nan" and case.lengths == "none" and case.band == "open":
        case = replace(case, band="causal")
    if case.layout == "expanded" and case.place != "dense":
        case = replace(case, layout="bshd")
    return case


def factors(case: Case) -> tuple[tuple[str, object], ...]:
    """The factors of a case that pairs are formed of."""
    return tuple((name, getattr(case, name)) for name in LEVELS)


def all_pairs(
    seed: int, most: int | None = None, levels: Mapping[str, tuple[object, ...]] = LEVELS
) -> list[Case]:
    """Cases in which every legal pair of two factors' levels occurs, or the first ``most``.

    Greedy: of some drawn candidates the one with the most new pairs is taken, until no drawn case
    brings any; each pair that was never drawn gets a case of its own, among other drawn levels.
    Factors without ``levels`` stay plain.
    """
    draw = random.Random(seed)
    covered: set[tuple[object, ...]] = set()
    chosen: list[Case] = []
    misses = 0
    while misses < 20 and (most is None or len(chosen) < most):
        candidates = [_drawn(draw, levels) for _ in range(40)]
        best = max(candidates, key=lambda case: len(_pairs(case) - covered))
        new = _pairs(best) - covered
        misses = 0 if new else misses + 1
        if new:
            covered |= new
            chosen.append(best)
    if most is not None:
        return chosen
    in_order = [(name, levels[name]) for name in LEVELS if name in levels]
    for (name, choices), (other, others) in itertools.combinations(in_order, 2):
        for level, second in itertools.product(choices, others):
            if ((name, level), (other, second)) in covered:
                continue
            asked = {name: level, other: second}
            candidates = [legal(replace(_drawn(draw, levels), **asked)) for _ in range(40)]
            # Beside other levels, either of them may have yielded.
            kept = [case for case in candidates if (name, level) in factors(case)]
            kept = [case for case in kept if (other, second) in factors(case)]
            if kept:
                chosen.append(max(kept, key=lambda case: len(_pairs(case) - covered)))
                covered |= _pairs(chosen[-1])
    return chosen


def _drawn(draw: random.Random, levels: Mapping[str, tuple[object, ...]]) -> Case:
    return legal(Case(**{name: draw.choice(choices) for name, choices in levels.items()}))


def _pairs(case: Case) -> set[tuple[object, ...]]:
    return set(itertools.combinations(factors(case), 2))


def at_extents(case: Case, extents: tuple[tuple[int, int], ...], seed: int) -> Iterator[Case]:
    """The case at several extents: the same compiled code, other lengths and values."""
    for number, (rows, keys) in enumerate(extents):
        yield replace(case, rows=rows, keys=keys, batch=1 + number % 3, seed=seed + number)


def of_one_kernel(case: Case, number: int) -> Iterator[Case]:
    """36 cases that differ in what does not change the code: every third has few queries."""
    if number % 3:
        extents = MANY_ROWS
    else:
        rows = (1, 4, 7)[number // 3 % 3]
        extents = tuple((rows, keys) for keys in FEW_KEYS for _ in range(3))
    for index, (rows, keys) in enumerate(extents):
        yield replace(case, rows=rows, keys=keys, batch=2, seed=100 * number + index)


def uneven(case: Case, number: int) -> Iterator[Case]:
    """24 cases of the same code of the backward's kernels; of every third, few rows."""
    rows = UNEVEN_ROWS if number % 3 else ((1, 4, 7)[number // 3 % 3],) * len(UNEVEN_ROWS)
    for index, (count, keys) in enumerate(itertools.product(rows, UNEVEN_KEYS)):
        yield replace(case, rows=count, keys=keys, batch=2, seed=100 * number + index)
