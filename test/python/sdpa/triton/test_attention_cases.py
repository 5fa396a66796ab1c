"""Whether the drawn cases of attention hold every pair of two factors' levels that is legal."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from attention_cases.case import LEVELS, Case, all_pairs, factors, legal

pytestmark = pytest.mark.L0


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_every_legal_pair_occurs(seed: int) -> None:
    drawn = all_pairs(seed)
    seen = {pair for case in drawn for pair in itertools.combinations(factors(case), 2)}
    # Beside packed sequences nothing yields but what a pair itself asks for.
    plain = replace(Case(), lengths="lengths")
    missing = []
    for (name, levels), (other, others) in itertools.combinations(LEVELS.items(), 2):
        for level, second in itertools.product(levels, others):
            case = legal(replace(plain, **{name: level, other: second}))
            kept = (getattr(case, name), getattr(case, other)) == (level, second)
            if kept and ((name, level), (other, second)) not in seen:
                missing.append(f"{name}={level}, {other}={second}")
    assert not missing
    assert all(legal(case) == case for case in drawn)
