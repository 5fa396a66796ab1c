"""What must hold between two sets of embeddings of the same sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.minilm.model import Sentence

# Two similarities that lie no further apart are a tie: their order says nothing.
TIE = 1e-6


@dataclass(frozen=True)
class RankingCheck:
    """How two rankings of all other sentences, for every sentence, compare.

    ``same`` sentences have one order in both. For ``ties`` the orders differ only among others
    whose similarities lie within TIE in both. For ``wrong`` a clear order is reversed.
    """

    same: int
    ties: int
    wrong: int
    closest_margin: float


def similarities(embeddings: torch.Tensor) -> torch.Tensor:
    """Cosines between all sentences (N, N), in float64."""
    wide = embeddings.double()
    wide = wide / wide.norm(dim=-1, keepdim=True)
    return wide @ wide.T


def check_rankings(first: torch.Tensor, second: torch.Tensor) -> RankingCheck:
    """Compare, sentence by sentence, the order of all the others by similarity.

    ``first`` and ``second`` are embeddings (N, E). ``closest_margin`` is the smallest gap between
    neighbours in a ranking that is more than a tie; infinite if there is none.
    """
    one, two = similarities(first), similarities(second)
    count = one.shape[0]
    counts = {"same": 0, "ties": 0, "wrong": 0}
    closest = float("inf")
    for index in range(count):
        others = torch.arange(count) != index
        a, b = one[index, others], two[index, others]
        gap_a, gap_b = (row.unsqueeze(1) - row.unsqueeze(0) for row in (a, b))
        reversed_pairs = (gap_a > 0) & (gap_b <= 0)
        clear = (gap_a > TIE) | (gap_b < -TIE)
        if not reversed_pairs.any():
            counts["same"] += 1
        elif (reversed_pairs & clear).any():
            counts["wrong"] += 1
        else:
            counts["ties"] += 1
        steps = a.sort().values.diff()
        closest = min([closest, *steps[steps > TIE].tolist()])
    return RankingCheck(**counts, closest_margin=closest)


@dataclass(frozen=True)
class SubjectFigures:
    """How well the embeddings tell the subjects apart."""

    within: float
    across: float
    nearest_of_same_subject: int


def subject_figures(matrix: torch.Tensor, sentences: Sequence[Sentence]) -> SubjectFigures:
    """Mean similarities within and across subjects, and how many nearest neighbours agree."""
    names = [sentence.subject for sentence in sentences]
    same = torch.tensor([[a == b for b in names] for a in names])
    itself = torch.eye(len(names), dtype=torch.bool)
    nearest = matrix.masked_fill(itself, -2.0).argmax(dim=1)
    agree = sum(names[i] == names[j] for i, j in enumerate(nearest.tolist()))
    return SubjectFigures(
        within=matrix[same & ~itself].mean().item(),
        across=matrix[~same].mean().item(),
        nearest_of_same_subject=agree,
    )
