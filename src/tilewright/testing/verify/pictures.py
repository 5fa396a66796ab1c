"""Error maps as PNG files in memory, without a plotting library."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch

# A picture has at most this many cells a side, and about this many pixels.
_ELEMENTS = 256
_PIXELS = 260
_FINE, _ALLOWED, _SPECIAL = (255, 255, 255), (255, 214, 102), (90, 0, 130)
# Just beyond the bound, and a hundred thousand bounds and more.
_BEYOND, _FAR = (245, 130, 60), (130, 0, 20)
_FAR_DECADES = 5.0


@dataclass(frozen=True)
class ErrorMap:
    """|error| over the last two axes, where it is worst: white 0, yellow at the bound, orange to
    dark red beyond it, violet where NaN or infinities differ. ``at`` is the index of the plane."""

    png: bytes
    at: tuple[int, ...]
    name: str


def error_map(name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> ErrorMap | None:
    """The map of one result; None if the shapes differ or it is empty."""
    if got.shape != want.shape or got.numel() == 0:
        return None
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    finite = torch.isfinite(got) & torch.isfinite(want)
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    ratio = torch.where(finite, (got - want).abs() / max(bound, 1e-300), 0.0)
    ratio = torch.where(finite | same, ratio, float("inf"))
    while ratio.dim() < 2:
        ratio = ratio[None]
    planes = ratio.flatten(0, -3) if ratio.dim() > 2 else ratio[None]
    worst = int(planes.flatten(1).amax(dim=1).argmax())
    at: list[int] = []
    rest = worst
    for extent in reversed(ratio.shape[:-2]):
        at.append(rest % extent)
        rest //= extent
    plane = planes[worst]
    if max(plane.shape) > _ELEMENTS:
        # Each cell of a large plane shows its worst element.
        sides = [min(extent, _ELEMENTS) for extent in plane.shape]
        plane = torch.nn.functional.adaptive_max_pool2d(plane[None], sides)[0]
    return ErrorMap(_png(_colors(plane)), tuple(reversed(at)), name)


def _colors(ratio: torch.Tensor) -> torch.Tensor:
    """uint8 (rows, columns, 3)."""
    fine, allowed, beyond, far, special = (
        torch.tensor(color, dtype=torch.float64)
        for color in (_FINE, _ALLOWED, _BEYOND, _FAR, _SPECIAL)
    )
    inside = ratio.clamp(max=1.0)[..., None]
    decades = ratio.clamp(min=1.0).log10().clamp(max=_FAR_DECADES)[..., None] / _FAR_DECADES
    colors = torch.where(
        ratio[..., None] <= 1.0,
        fine + (allowed - fine) * inside,
        beyond + (far - beyond) * decades,
    )
    colors = torch.where(torch.isinf(ratio)[..., None], special, colors)
    return colors.round().to(torch.uint8)


def _png(colors: torch.Tensor) -> bytes:
    rows, columns = colors.shape[:2]
    factor = max(1, _PIXELS // max(rows, columns))
    image = colors.repeat_interleave(factor, 0).repeat_interleave(factor, 1)
    height, width = image.shape[:2]
    # Each line of a PNG starts with the number of its filter; 0 is none.
    lines = b"".join(b"\x00" + bytes(line.flatten().tolist()) for line in image)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(lines, 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
