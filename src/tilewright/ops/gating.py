"""A gate behind attention: O * sigmoid(gate), one kernel where a GPU has the operands."""

from __future__ import annotations

import torch

from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import MAX_RANK
from tilewright.ops.custom import is_traced
from tilewright.ops.declaring import bind_output, declare_all
from tilewright.ops.plan_cache import operands_key, run


def gated(
    o: torch.Tensor, gate: torch.Tensor, out: torch.Tensor | None, *, engine: str | None = None
) -> torch.Tensor:
    """``o * sigmoid(gate)`` in o's data type, in ``out`` if given, which may overlap the gate.

    By operations of PyTorch where gradients are wanted, in a trace, and on a CPU, unless ``engine``
    is named.
    """
    needs_grad = torch.is_grad_enabled() and (o.requires_grad or gate.requires_grad)
    is_plain = o.device.type != "cpu" and o.dim() <= MAX_RANK
    if engine is None and (needs_grad or not is_plain or is_traced(o, gate, out)):
        wide = torch.float64 if o.dtype is torch.float64 else torch.float32
        made = (o.to(wide) * torch.sigmoid(gate.to(wide))).to(o.dtype)
        return made if out is None else out.copy_(made)
    made = torch.empty_like(o) if out is None else out
    if made.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr():
        # What is written over a part of it would be read again.
        gate = gate.clone()
    inputs = {"o": o, "gate": gate}

    def declare(graph: DeclaredGraph) -> None:
        given = declare_all(graph, inputs)
        result = graph.mul(given["o"], graph.sigmoid(given["gate"]))
        bind_output(result, "result", made)

    key = (operands_key(inputs), operands_key({"result": made}))
    run("gate", key, declare, inputs, {"result": made}, device=o.device, engine=engine)
    return made
