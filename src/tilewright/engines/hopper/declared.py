"""What a declaration of attention says, forward and backward, as all of Hopper's kernels ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.engines.hopper.bounds import Bounds, lengths_of, read_bounds
from tilewright.errors import NotSupportedError
from tilewright.graph.operation import Operation
from tilewright.graph.tensor import Tensor

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Declared(Bounds):
    """Operands by port, extents, the band, and the tensors of sequences' lengths or their sums.

    Of the outputs, ``ports`` has those that are stored.
    """

    ports: Mapping[str, Tensor]
    batch: int
    heads_q: int
    heads_kv: int
    rows: int
    keys: int
    depth: int
    depth_v: int
    lengths_q: Tensor | None
    lengths_kv: Tensor | None

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.heads_q // self.heads_kv

    @property
    def is_banded(self) -> bool:
        """True if a band hides keys."""
        return self.left is not None or self.right is not None

    @property
    def has_lengths(self) -> bool:
        """True if sequences have lengths of their own."""
        return self.lengths_q is not None or self.lengths_kv is not None


def ports_of(operation: Operation) -> dict[str, Tensor]:
    """Inputs, and outputs that are stored, by port."""
    stored = {name: t for name, t in operation.outputs.items() if not t.is_virtual}
    return dict(operation.inputs) | stored


def declared(operation: Any, ports: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of ``Declared``, of a validated attention operation."""
    extents = operation.extents()
    lengths = lengths_of(ports)
    has_lengths = any(tensor is not None for tensor in lengths.values())
    bounds = read_bounds(operation, extents.rows, extents.keys, has_lengths=has_lengths)
    by_side = {f"lengths_{side}": tensor for side, tensor in lengths.items()}
    return {"ports": ports, **extents._asdict(), **vars(bounds), **by_side}


def require_countable(operation: Any, places_a_row: int = 1) -> None:
    """The rows of all heads, ``places_a_row`` times, are counted in 32 bits.

    Raises:
        NotSupportedError: if they are more.
    """
    extents = operation.extents()
    if extents.batch * extents.heads_q > _INT32_MAX // (places_a_row * max(extents.rows, 1)):
        raise NotSupportedError(
            f"{operation.title()}: {extents.batch} x {extents.heads_q} heads are too many"
        )
