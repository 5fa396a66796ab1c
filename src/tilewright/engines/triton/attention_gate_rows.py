"""A gate behind an attention kernel that does not multiply itself: O sigmoid(gate), in place.

For the kernel of warp groups, whose loop takes longer if it ends with a gate: over many keys that
is more than reading O again takes. O is rounded to its type before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tilewright.engines.compiled.planned import PlannedKernel
from tilewright.engines.triton.attention_addresses import row_offsets
from tilewright.engines.triton.attention_arguments import KernelArguments, add_forward_operands
from tilewright.engines.triton.attention_config import whole
from tilewright.engines.triton.attention_loop import load_piece
from tilewright.engines.triton.attention_output import gate_piece, store_piece
from tilewright.engines.triton.attention_spec import AttentionSpec

# Elements of a tile; a program has one.
_ELEMENTS = 8192


@triton.jit
def attention_gate(
    o, gate,
    o_batch, o_head, o_row, o_col, gate_batch, gate_head, gate_row, gate_col,
    rows, heads, tiles,
    DV: tl.constexpr, DV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    O_UNIT: tl.constexpr, GATE_UNIT: tl.constexpr, GATE_O: tl.constexpr, GATE_TYPE: tl.constexpr,
):  # fmt: skip
    """One program a tile of BLOCK_M rows of one head of dense operands."""
    both = tl.program_id(0) // tiles
    head, batch = both % heads, both // heads
    row = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = row < rows
    at = row_offsets(row, None, batch, head, 0, 1, o_batch, o_head, o_row, O_UNIT)
    gate_at = row_offsets(row, None, batch, head, 0, 1, gate_batch, gate_head, gate_row, GATE_UNIT)
    values = load_piece(o, at, in_rows, o_col, 0, DV_BLOCK, DV, False, True).to(tl.float32)
    values = gate_piece(
        values, gate, gate_at, in_rows, gate_col, 0, DV_BLOCK, DV, GATE_O, GATE_TYPE
    )
    store_piece(o, at, in_rows, o_col, values, 0, DV_BLOCK, DV)


def gate_kernel(
    spec: AttentionSpec, slots: Mapping[int, int], *, is_aligned: bool
) -> PlannedKernel:
    """The launch behind kernels that stored O alone where the product is to be."""
    arguments = KernelArguments(slots)
    add_forward_operands(arguments, spec, is_aligned=is_aligned)
    block = whole(spec.depth_v)
    block_m = max(_ELEMENTS // block, 1)
    tiles = triton.cdiv(spec.rows, block_m)
    arguments.extent("tiles", tiles)
    arguments.constant(DV_BLOCK=block, BLOCK_M=block_m)
    return arguments.planned(attention_gate, (tiles * spec.heads_q * spec.batch, 1, 1), 4, 1)
