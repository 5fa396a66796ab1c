"""Score programs: pointwise operations on a block of scores, and their gradient.

A program sees float32 scores (float64 for float64 attention), after the scale and before bias and
masks, as (sequences, query heads, rows, keys). Index tensors count in the whole operation, not in
the block; other tensors that it reads broadcast to (B, Hq, Sq, Skv) and are sliced alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from tilewright.engines.aten.attention_blocks import Block
from tilewright.engines.aten.pointwise import PointwiseParameters, apply_pointwise
from tilewright.errors import NotSupportedError

Tensor = torch.Tensor


class _Step(NamedTuple):
    mode: str
    arguments: tuple[int, ...]
    result: int
    parameters: PointwiseParameters


class _Program(NamedTuple):
    """A program with its tensors by identity."""

    source: int
    gradient: int | None
    result: int
    steps: tuple[_Step, ...]


class ScoreModifier:
    """The score program of one operation, and its gradient program if one was given."""

    def __init__(self, op: Any) -> None:
        self.forward = _compile(op, op.score_mod)
        backward = getattr(op, "score_mod_bprop", None)
        self.backward = None if backward is None else _compile(op, backward)
        self.ports = {
            id(record): port for port, record in op.inputs.items() if port.startswith("score_mod")
        }
        self.defaults = {
            id(record): record.value
            for record in op.inputs.values()
            if record.is_pass_by_value and record.value is not None
        }

    def bind(self, inputs: Mapping[str, Tensor], compute: torch.dtype) -> BoundProgram:
        """The program with the operands of one call."""
        external = {}
        for key, port in self.ports.items():
            if port in inputs:
                external[key] = inputs[port]
            elif key in self.defaults:
                external[key] = torch.tensor(self.defaults[key], device="cpu")
        return BoundProgram(self, external, compute)


class BoundProgram:
    """A score program with one call's operands."""

    def __init__(
        self, modifier: ScoreModifier, external: dict[int, Tensor], compute: torch.dtype
    ) -> None:
        self._modifier = modifier
        self._external = external
        self._compute = compute

    def narrow_batch(self, batch: int) -> BoundProgram:
        """The program for sequence ``batch`` alone."""
        external = {
            key: tensor.narrow(0, batch, 1)
            if tensor.dim() == 4 and tensor.shape[0] != 1
            else tensor
            for key, tensor in self._external.items()
        }
        return BoundProgram(self._modifier, external, self._compute)

    def apply(self, scores: Tensor, block: Block, first_batch: int) -> Tensor:
        """Modified scores, a new contiguous tensor of the same shape."""
        program = self._modifier.forward
        known = self._known(scores, block, first_batch)
        known[program.source] = scores
        result = self._run(program, known, scores, block, first_batch)
        return self._dense(result, scores)

    def gradient(self, scores: Tensor, incoming: Tensor, block: Block, first_batch: int) -> Tensor:
        """The gradient with respect to ``scores``, given that of the modified scores."""
        forward, backward = self._modifier.forward, self._modifier.backward
        known = self._known(scores, block, first_batch)
        if backward is None:
            return self._derived(forward, known, scores, incoming, block, first_batch)
        known[backward.source] = scores
        if backward.gradient is not None:
            known[backward.gradient] = incoming
        result = self._run(backward, known, scores, block, first_batch)
        return self._dense(result, scores)

    def _derived(
        self,
        program: _Program,
        known: dict[int, Any],
        scores: Tensor,
        incoming: Tensor,
        block: Block,
        first_batch: int,
    ) -> Tensor:
        """The gradient by autograd, in whatever mode the caller is."""
        with torch.inference_mode(False), torch.enable_grad():
            # Tensors of inference mode cannot be saved for a backward; their copies can.
            known = {key: entry.clone() for key, entry in known.items()}
            leaf = scores.clone().requires_grad_()
            known[program.source] = leaf
            result = self._run(program, known, leaf, block, first_batch)
            result = result.to(leaf.dtype).expand(leaf.shape)
            if not result.requires_grad:
                return torch.zeros_like(scores)
            (found,) = torch.autograd.grad(result, leaf, incoming.clone(), allow_unused=True)
        return torch.zeros_like(scores) if found is None else found.contiguous()

    def _dense(self, result: Tensor, scores: Tensor) -> Tensor:
        result = result.to(scores.dtype).expand(scores.shape)
        return result.clone(memory_format=torch.contiguous_format)

    def _known(self, scores: Tensor, block: Block, first_batch: int) -> dict[int, Any]:
        bounds = (block.batch, block.head, block.row, block.key)
        return {
            key: _sliced(tensor, bounds).to(scores.device, self._compute)
            for key, tensor in self._external.items()
        }

    def _run(
        self,
        program: _Program,
        known: dict[int, Any],
        scores: Tensor,
        block: Block,
        first_batch: int,
    ) -> Tensor:
        for step in program.steps:
            if step.mode == "gen_index":
                known[step.result] = _index(step.parameters.axis, scores, block, first_batch)
            else:
                arguments = [known[key] for key in step.arguments]
                known[step.result] = apply_pointwise(step.mode, arguments, step.parameters)
        result: Tensor = known[program.result]
        return result


def _compile(op: Any, program: Any) -> _Program:
    steps = []
    for step in program.operations:
        if step.kind != "pointwise":
            raise NotSupportedError(
                f"{op.title()}: the score program has a {step.kind}; "
                "it is made of pointwise operations"
            )
        ports = [port for port in ("in0", "in1", "in2") if port in step.inputs]
        steps.append(
            _Step(
                mode=step.mode,
                arguments=tuple(id(step.inputs[port]) for port in ports),
                result=id(step.outputs["out"]),
                parameters=PointwiseParameters.of(step),
            )
        )
    gradient = program.gradient
    return _Program(
        source=id(program.input),
        gradient=None if gradient is None else id(gradient),
        result=id(program.output),
        steps=tuple(steps),
    )


def _sliced(tensor: Tensor, bounds: tuple[tuple[int, int], ...]) -> Tensor:
    tensor = tensor.reshape((1,) * (len(bounds) - tensor.dim()) + tuple(tensor.shape))
    for axis, (first, last) in enumerate(bounds):
        if tensor.shape[axis] != 1:
            tensor = tensor.narrow(axis, first, last - first)
    return tensor


def _index(axis: int, scores: Tensor, block: Block, first_batch: int) -> Tensor:
    axis %= 4
    first, last = (block.batch, block.head, block.row, block.key)[axis]
    if axis == 0:
        first, last = first + first_batch, last + first_batch
    shape = [1, 1, 1, 1]
    shape[axis] = last - first
    return torch.arange(first, last, device=scores.device).to(scores.dtype).view(shape)
