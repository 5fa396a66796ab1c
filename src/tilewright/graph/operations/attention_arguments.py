"""From the arguments of the attention methods to ports and attributes of their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.errors import GraphError
from tilewright.graph.builder import Builder
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor

ScoreCallback = Callable[..., Tensor]


def title_of(kind: str, name: str) -> str:
    """How messages call an operation that is not declared yet."""
    return f"{kind} {name!r}" if name else kind


def one_spelling(title: str, **spellings: Any) -> Any:
    """The value of an argument that has two names, None if neither is given.

    Raises:
        GraphError: if both are given.
    """
    given = {name: value for name, value in spellings.items() if value is not None}
    if len(given) > 1:
        raise GraphError(f"{title}: {' and '.join(given)} are one argument; expected one of them")
    return next(iter(given.values()), None)


def wants_stats(title: str, is_inference: Any, generate_stats: Any) -> bool:
    """Whether Stats is asked for; ``is_inference`` is its older, negated spelling.

    Raises:
        GraphError: if the two contradict one another, or one is no bool.
    """
    for name, value in (("is_inference", is_inference), ("generate_stats", generate_stats)):
        if value is not None and not isinstance(value, bool):
            raise GraphError(f"{title}: {name} is {value!r}; expected True, False or None")
    if is_inference is not None and generate_stats is is_inference:
        raise GraphError(
            f"{title}: is_inference is {is_inference} and generate_stats is {generate_stats}; "
            "expected one of them: inference makes no Stats"
        )
    return is_inference is False if generate_stats is None else bool(generate_stats)


def split_scale(attn_scale: Any) -> tuple[float | None, Tensor | None]:
    """``attn_scale`` as (attribute, port), one of them None."""
    return (None, attn_scale) if isinstance(attn_scale, Tensor) else (attn_scale, None)


def split_dropout(
    title: str, dropout: Any, *, takes_inverse: bool = False
) -> tuple[float | None, dict[str, Tensor]]:
    """``dropout`` as (probability, ports).

    A backward also takes (mask, scale, inverse of the scale).

    Raises:
        GraphError: if it is neither (probability, seed, offset) nor (mask, scale).
    """
    if dropout is None:
        return None, {}
    parts = tuple(dropout) if isinstance(dropout, tuple | list) else ()
    is_tensor = [isinstance(part, Tensor) for part in parts]
    if len(parts) == 3 and is_tensor[1:] == [True, True] and _is_number(parts[0]):
        return float(parts[0]), {"dropout_seed": parts[1], "dropout_offset": parts[2]}
    if all(is_tensor) and (len(parts) == 2 or (takes_inverse and len(parts) == 3)):
        ports = ("dropout_mask", "dropout_scale", "dropout_scale_inv")
        return None, dict(zip(ports, parts, strict=False))
    forms = "(probability, seed tensor, offset tensor) or (mask tensor, scale tensor)"
    raise GraphError(f"{title}: dropout is {dropout!r}; expected {forms}")


def program_ports(programs: Mapping[str, ScoreProgram | None]) -> dict[str, Tensor]:
    """The ports for what score programs read and do not make, as "score_mod_0" and so on."""
    return {
        f"{attribute}_{index}": tensor
        for attribute, program in programs.items()
        if program is not None
        for index, tensor in enumerate(program.external_inputs())
    }


class ScoreRecorder(Builder):
    """Runs score callbacks and keeps what they declare as programs."""

    def _record_score_mod(self, title: str, callback: ScoreCallback | None) -> ScoreProgram | None:
        """The program of ``callback(graph, score)``, None for no callback."""
        if callback is None:
            return None
        score = self._score_tensor(title, "score")
        operations, output = self._record(f"{title}: score_mod", callback, score)
        return ScoreProgram(input=score, output=output, operations=operations)

    def _record_score_mod_bprop(
        self, title: str, callback: ScoreCallback | None, forward: ScoreProgram | None
    ) -> ScoreProgram | None:
        """The program of ``callback(graph, dScore, score)``, None for no callback.

        ``score`` is what the forward program reads, not what it returns.
        """
        if callback is None:
            return None
        where = f"{title}: score_mod_bprop"
        if forward is None:
            raise GraphError(f"{where} is given without score_mod; expected both")
        gradient = self._score_tensor(title, "dScore")
        score = self._score_tensor(title, "score")
        operations, output = self._record(where, callback, gradient, score)
        program = ScoreProgram(input=score, output=output, operations=operations, gradient=gradient)
        inner = {id(tensor) for step in forward.operations for tensor in step.outputs.values()}
        inner.add(id(forward.input))
        for tensor in program.external_inputs():
            if id(tensor) in inner:
                raise GraphError(
                    f"{where} reads tensor {tensor.label()}, which score_mod made; expected it "
                    "to be computed again from the score"
                )
        return program

    def _score_tensor(self, title: str, role: str) -> Tensor:
        tensor = self._new_tensor(f"{title}::{role}")
        tensor.is_virtual = True
        return tensor

    def _record(
        self, where: str, callback: ScoreCallback, *arguments: Tensor
    ) -> tuple[tuple[Any, ...], Tensor]:
        if not callable(callback):
            raise GraphError(f"{where} is {callback!r}; expected a function")
        if self._recording is not None:
            raise GraphError(f"{where}: a score program has pointwise operations only")
        self._recording = []
        try:
            output = callback(self, *arguments)
            operations = tuple(self._recording)
        finally:
            self._recording = None
        for operation in operations:
            if operation.kind != "pointwise":
                raise GraphError(
                    f"{where} declares {operation.title()}; expected pointwise operations only"
                )
        self._require_own(output, f"{where}: the returned score")
        return operations, output


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
