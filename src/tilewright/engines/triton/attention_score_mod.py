"""A score program as a Triton function, generated from its operations.

    score_program(score, row, col, batch, head, given_0, ..) -> score

``score`` are scaled scores in float32; indices broadcast against them; ``given_i`` are the
one-element tensors that the program reads, as numbers. Pure until ``score_function`` is called.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tilewright.dtypes import DataType
from tilewright.engines.triton.pointwise_modes import CONDITION, SINGLE, expression
from tilewright.errors import NotSupportedError
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor

# One-element tensors that a program may read.
MAX_GIVEN = 4
# What counts along each axis of the scores (B, Hq, Sq, Skv).
_INDICES = ("batch", "head", "row", "col")
_HEAD = "@triton.jit\ndef {name}(score, row, col, batch, head, {given}):\n"


def score_text(title: str, program: ScoreProgram) -> tuple[str, str]:
    """(name, source) of the program's function.

    Raises:
        NotSupportedError: for a tensor or a mode that the kernels do not take, naming it.
    """
    given = program.external_inputs()
    for tensor in given:
        one = tensor.dim and all(extent == 1 for extent in tensor.dim)
        if not one or tensor.data_type not in (DataType.FLOAT, DataType.HALF, DataType.BFLOAT16):
            raise NotSupportedError(
                f"{title}: score_mod reads tensor {tensor.label()} of dim {tensor.dim} and type "
                f"{tensor.data_type.name}; the kernels take one element in float32 or 16 bits"
            )
    if len(given) > MAX_GIVEN:
        raise NotSupportedError(
            f"{title}: score_mod reads {len(given)} tensors; the kernels take up to {MAX_GIVEN}"
        )
    names: dict[int, str] = {id(program.input): "score"}
    names |= {id(tensor): f"given_{number}" for number, tensor in enumerate(given)}
    lines = []
    for number, step in enumerate(program.operations):
        result = f"value_{number}"
        if step.mode == "gen_index":
            lines.append(f"{result} = ({_INDICES[step.axis % 4]} + 0).to(tl.float32)")
        else:
            operands = _operands(step)
            text, kind = expression(step, [names[id(tensor)] for tensor in operands], SINGLE)
            suffix = ".to(tl.float32)" if kind == CONDITION else ""
            lines.append(f"{result} = ({text}){suffix}")
        names[id(step.outputs["out"])] = result
    # A result that does not depend on the score still has one value for each.
    lines.append(f"return tl.zeros_like(score) + {names[id(program.output)]}")
    arguments = ", ".join(f"given_{number}" for number in range(MAX_GIVEN))
    body = "".join(f"    {line}\n" for line in lines)
    name = "score_program_" + hashlib.sha256(body.encode()).hexdigest()[:12]
    return name, _HEAD.format(name=name, given=arguments) + body


def score_function(title: str, program: ScoreProgram) -> Any:
    """The jitted function of ``score_text``."""
    from tilewright.engines.triton.pointwise_codegen import function_of

    return function_of(*score_text(title, program))


def _operands(step: Any) -> list[Tensor]:
    return [step.inputs[port] for port in ("in0", "in1", "in2") if port in step.inputs]
