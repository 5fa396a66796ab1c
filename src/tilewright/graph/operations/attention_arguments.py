"""From the arguments of the attention methods to ports and attributes of their records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.errors import GraphError
from tilewright.graph.attributes import shown
from tilewright.graph.builder import Builder, OperationType
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
            raise GraphError(f"{title}: {name} is {shown(value)}; expected True, False or None")
    if is_inference is not None and generate_stats is is_inference:
        raise GraphError(
            f"{title}: is_inference is {is_inference} and generate_stats is {generate_stats}; "
            "expected one of them: inference makes no Stats"
        )
    return is_inference is False if generate_stats is None else bool(generate_stats)


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
        return parts[0], {"dropout_seed": parts[1], "dropout_offset": parts[2]}
    if all(is_tensor) and (len(parts) == 2 or (takes_inverse and len(parts) == 3)):
        ports = ("dropout_mask", "dropout_scale", "dropout_scale_inv")
        return None, dict(zip(ports, parts, strict=False))
    forms = "(probability, seed tensor, offset tensor) or (mask tensor, scale tensor)"
    raise GraphError(f"{title}: dropout is {shown(dropout)}; expected {forms}")


class AttentionDeclarer(Builder):
    """Declares attention operations; the methods of each kind call ``_declare_attention``."""

    def _declare_attention(
        self,
        record: type[OperationType],
        inputs: Mapping[str, Tensor | None],
        *,
        name: str,
        attn_scale: float | Tensor | None,
        dropout: Any = None,
        score_mod: ScoreCallback | None = None,
        score_mod_bprop: ScoreCallback | None = None,
        **rest: Any,
    ) -> OperationType:
        """``Builder.append``, with the arguments that become ports and attributes split."""
        title = title_of(record.kind, name)
        backward = "dO" in inputs
        probability, dropout_ports = split_dropout(title, dropout, takes_inverse=backward)
        scale_tensor = attn_scale if isinstance(attn_scale, Tensor) else None
        ports: dict[str, Tensor | None] = {**inputs, "attn_scale": scale_tensor, **dropout_ports}
        if score_mod is not None:
            program = self._record_score_mod(title, name, score_mod)
            rest["score_mod"] = program
            ports |= _program_ports("score_mod", program)
        if score_mod_bprop is not None:
            if score_mod is None:
                raise GraphError(f"{title}: score_mod_bprop is given without score_mod")
            program = self._record_score_mod_bprop(title, name, score_mod_bprop)
            rest["score_mod_bprop"] = program
            ports |= _program_ports("score_mod_bprop", program)
        return self.append(
            record,
            ports,
            name=name,
            attn_scale=attn_scale if scale_tensor is None else None,
            dropout_probability=probability,
            **rest,
        )

    def _record_score_mod(self, title: str, name: str, callback: ScoreCallback) -> ScoreProgram:
        """The program of ``callback(graph, score)``."""
        score = self._score_tensor(name, "score")
        operations, output = self._record(f"{title}: score_mod", callback, score)
        return ScoreProgram(input=score, output=output, operations=operations)

    def _record_score_mod_bprop(
        self, title: str, name: str, callback: ScoreCallback
    ) -> ScoreProgram:
        """The program of ``callback(graph, dScore, score)``.

        ``score`` is what the forward program reads, not what it returns.
        """
        gradient = self._score_tensor(name, "dScore")
        score = self._score_tensor(name, "score")
        operations, output = self._record(f"{title}: score_mod_bprop", callback, gradient, score)
        return ScoreProgram(input=score, output=output, operations=operations, gradient=gradient)

    def _score_tensor(self, name: str, role: str) -> Tensor:
        tensor = self._new_tensor(f"{name}::{role}" if name else role)
        tensor.is_virtual = True
        return tensor

    def _record(
        self, where: str, callback: ScoreCallback, *arguments: Tensor
    ) -> tuple[tuple[Any, ...], Tensor]:
        if not callable(callback):
            raise GraphError(f"{where} is {shown(callback)}; expected a function")
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
        self.require_own(output, f"{where}: the returned score")
        return operations, output


def _program_ports(attribute: str, program: ScoreProgram) -> dict[str, Tensor]:
    return {
        f"{attribute}_{index}": tensor for index, tensor in enumerate(program.external_inputs())
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
