"""Score programs that are soft caps: tanh(score * a) * b, which kernels have by themselves."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import NotSupportedError
from tilewright.graph.score_program import ScoreProgram
from tilewright.graph.tensor import Tensor


@dataclass(frozen=True)
class SoftCap:
    """score -> tanh(score * inner) * outer, or tanh(score / inner) * outer if ``divides``.

    ``inner`` and ``outer`` are one-element tensors on ports of the operation; None is 1.
    """

    inner: Tensor | None
    outer: Tensor | None
    divides: bool


def read_soft_cap(title: str, program: ScoreProgram) -> SoftCap:
    """The program as a soft cap.

    Raises:
        NotSupportedError: for any other program, naming the operation that does not fit.
    """
    score, inner, outer = program.input, None, None
    divides = is_capped = False
    for step in program.operations:
        first, second = step.inputs["in0"], step.inputs.get("in1")
        mode = getattr(step, "mode", step.kind)
        fits = "in2" not in step.inputs
        if mode == "tanh" and first is score and not is_capped:
            is_capped = True
        elif mode in ("mul", "div") and second is not None:
            if second is score and mode == "mul":
                first, second = second, first
            one = bool(second.dim) and all(extent == 1 for extent in second.dim)
            fits = fits and first is score and second is not score and one
            fits = fits and second in program.external_inputs()
            if is_capped:
                fits = fits and outer is None and mode == "mul"
                outer = second
            else:
                fits = fits and inner is None
                inner, divides = second, mode == "div"
        else:
            fits = False
        if not fits:
            raise NotSupportedError(
                f"{title}: score_mod has {mode} on tensor {first.label()}; the kernels take "
                "soft caps, tanh(score * a) * b"
            )
        score = step.outputs["out"]
    if score is not program.output or not is_capped:
        raise NotSupportedError(
            f"{title}: score_mod returns tensor {program.output.label()}; the kernels take soft "
            "caps, tanh(score * a) * b"
        )
    return SoftCap(inner, outer, divides)
