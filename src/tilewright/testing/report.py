"""Where and by how much a result is wrong, in at most forty lines, and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.testing.tolerances import Bound, root_mean_square

__all__ = ["MAX_LINES", "bounded", "describe_difference", "error_picture", "where_wrong"]

MAX_LINES = 40
MAX_COLUMNS = 200
_ELEMENTS = 6
_ROWS = 5
_AXES = 8
# A picture has at most this many cells a side; larger planes show the worst error of each cell.
_CELLS = 512


def bounded(text: str, lines: int = MAX_LINES, columns: int = MAX_COLUMNS) -> str:
    """`text` cut to a number of lines and columns, saying so where it was cut."""
    split = [
        line if len(line) <= columns else line[: columns - 4] + " ..." for line in text.split("\n")
    ]
    if len(split) > lines:
        split = [*split[: lines - 1], f"... {len(split) - lines + 1} more lines"]
    return "\n".join(split)


def describe_difference(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    error: torch.Tensor,
    bad: torch.Tensor,
    bound: Bound,
) -> str:
    """The report of a failed comparison.

    Args:
        name: Of the result.
        got, want, error: float64, one shape; error is 0 where nothing is compared.
        bad: Boolean, which elements are wrong (none if only the root mean square is).
        bound: What was allowed.
    """
    wrong, total = int(bad.sum()), bad.numel()
    rms = root_mean_square(error)
    lines = [
        f"{name}: {wrong} of {total} elements ({100.0 * wrong / total:.3g} %) differ by more than "
        f"{bound.limit:.4g}",
        f"  allowed: {bound.reason}",
        f"  shape {tuple(got.shape)}; largest error {float(error.max()):.4g}; "
        f"root mean square of errors {rms:.4g}"
        + ("" if bound.rms_limit is None else f" (allowed {bound.rms_limit:.4g})"),
    ]
    if wrong:
        lines.extend(where_wrong(bad))
    lines.append("  worst elements:")
    lines.extend(_worst_elements(got, want, error))
    if error.dim() > 1 and error.shape[-1] > 1:
        lines.append("  worst rows (along the last axis):")
        lines.extend(_worst_rows(error, bad))
    return bounded("\n".join(lines))


def where_wrong(bad: torch.Tensor) -> list[str]:
    """One line for each axis: which indices hold wrong elements, as ranges."""
    lines = []
    for axis in range(min(bad.dim(), _AXES)):
        others = [other for other in range(bad.dim()) if other != axis]
        hit = bad.any(dim=others) if others else bad
        indices = hit.nonzero().reshape(-1).tolist()
        lines.append(
            f"  axis {axis}: wrong at {_ranges(indices)} ({len(indices)} of {bad.shape[axis]})"
        )
    return lines


def _ranges(indices: Sequence[int], shown: int = 8) -> str:
    """0-3, 8, 64-127 of sorted indices; only the first few ranges."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    parts = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs[:shown]]
    return ", ".join(parts) + (", ..." if len(runs) > shown else "")


def _coordinates(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for extent in reversed(shape):
        found.append(position % extent)
        position //= extent
    return tuple(reversed(found))


def _worst_elements(got: torch.Tensor, want: torch.Tensor, error: torch.Tensor) -> list[str]:
    flat = error.reshape(-1)
    positions = torch.topk(flat, min(_ELEMENTS, flat.numel())).indices.tolist()
    return [
        f"    at {_coordinates(position, error.shape)}: "
        f"actual {float(got.reshape(-1)[position]):.9g}, "
        f"expected {float(want.reshape(-1)[position]):.9g}, error {float(flat[position]):.4g}"
        for position in positions
    ]


def _worst_rows(error: torch.Tensor, bad: torch.Tensor) -> list[str]:
    rows = error.reshape(-1, error.shape[-1])
    wrong = bad.reshape(-1, error.shape[-1]).sum(dim=1)
    largest = rows.amax(dim=1)
    order = torch.topk(largest, min(_ROWS, rows.shape[0])).indices.tolist()
    return [
        f"    row {_coordinates(row, error.shape[:-1])}: {int(wrong[row])} of {rows.shape[1]} "
        f"wrong, largest error {float(largest[row]):.4g} at {int(rows[row].argmax())}"
        for row in order
    ]


def error_picture(
    path: str | os.PathLike[str],
    error: torch.Tensor,
    *,
    limit: float | None = None,
    plane: Sequence[int] | None = None,
    title: str = "",
) -> tuple[int, ...]:
    """Write a PNG of |error| over one plane, the last two axes, of a tensor.

    Args:
        path: Of the file to write.
        error: Any shape of at least one axis; NaN is shown as the worst.
        limit: What was allowed; errors are shown relative to it.
        plane: Index on each leading axis; by default that of the worst element.
        title: Above the picture.

    Returns:
        The indices of the plane shown.

    Raises:
        ImportError: matplotlib is not installed (`pip install tilewright[plots]`).
        ValueError: `plane` does not fit, or there is nothing to show.
    """
    values = error.detach().to("cpu", torch.float64).abs()
    values = torch.where(torch.isnan(values), math.inf, values)
    if values.numel() == 0:
        raise ValueError(f"error: shape {tuple(error.shape)} has no element to show")
    values = values.reshape(1, -1) if values.dim() < 2 else values
    leading = values.shape[:-2]
    if plane is None:
        plane = _coordinates(int(values.reshape(-1).argmax()), values.shape)[:-2]
    chosen = tuple(int(index) for index in plane)
    fits = len(chosen) == len(leading) and all(
        0 <= index < extent for index, extent in zip(chosen, leading, strict=True)
    )
    if not fits:
        raise ValueError(f"plane: {chosen}; expected one index for each of the axes {leading}")
    shown = _cells(values[chosen])
    finite = shown[torch.isfinite(shown)]
    top = float(finite.max()) if finite.numel() else 1.0
    shown = torch.where(torch.isinf(shown), max(top, limit or 0.0, 1e-300) * 10.0, shown)
    _draw(path, shown, values[chosen].shape, limit, f"{title} [{', '.join(map(str, chosen))}]")
    return chosen


def _cells(plane: torch.Tensor) -> torch.Tensor:
    """The worst error of each cell of a plane that is too large to show element by element."""
    steps = [max(1, -(-extent // _CELLS)) for extent in plane.shape]
    if max(steps) == 1:
        return plane
    pooled = torch.nn.functional.max_pool2d(plane[None, None], steps, stride=steps, ceil_mode=True)
    return pooled[0, 0]


def _draw(
    path: str | os.PathLike[str],
    shown: torch.Tensor,
    extents: Sequence[int],
    limit: float | None,
    title: str,
) -> None:
    # The object interface: no global figure, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 5.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    numbers: Any = shown.tolist()
    options: dict[str, Any] = {"cmap": "viridis"}
    label = "|error|"
    top = float(shown.max())
    if limit is not None and limit > 0:
        numbers = (shown / limit).tolist()
        label = f"|error| / allowed {limit:.3g}"
        options = {"cmap": "RdBu_r", "norm": TwoSlopeNorm(1.0, 0.0, max(top / limit, 1.001))}
    rows, columns = extents
    image = axes.imshow(
        numbers,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        **options,
    )
    axes.set_xlabel("last axis")
    axes.set_ylabel("axis before it")
    axes.set_title(bounded(title, 2, 80), fontsize=10)
    figure.colorbar(image, ax=axes, label=label)
    figure.savefig(os.fspath(path), format="png", metadata={"Software": None})
