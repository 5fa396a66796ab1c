"""A graph under declaration, of any family but attention."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.graph.enums import moe_grouped_matmul_mode, norm_forward_phase
from tilewright.graph.graph import DeclaredGraph
from tilewright.graph.tensor import Tensor

TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
IMAGE = (2, 8, 6, 6)


class Case:
    """A graph under declaration; ``t`` declares an input by name and extents."""

    def __init__(self) -> None:
        self.g = DeclaredGraph(io_data_type="FLOAT", intermediate_data_type="FLOAT")

    def t(self, name: str, *dim: int, **more: object) -> Tensor:
        return self.g.tensor(dim, name=name, **more)  # type: ignore[arg-type]

    def channels(self, *names: str) -> list[Tensor]:
        return [self.t(name, 1, 8, 1, 1) for name in names]

    def norm(self, kind: str, *dims: tuple[int, ...], phase: object = TRAINING, **more: object):
        """A forward normalization of input, scale and bias with these dims."""
        operands = [self.t(n, *d) for n, d in zip(("x", "scale", "bias"), dims, strict=False)]
        operands += [None] * (3 - len(operands))
        epsilon = more.pop("epsilon", 1e-5)
        return getattr(self.g, kind)(phase, *operands, epsilon=epsilon, name="n", **more)

    def norm_backward(self, kind: str, *dims: tuple[int, ...]):
        names = ("grad", "x", "scale", "mean", "inv")
        operands = [self.t(n, *d) for n, d in zip(names, dims, strict=False)]
        return getattr(self.g, f"{kind}_backward")(*operands, name="n")

    def batchnorm(self, **changes: object):
        scale, bias, mean, var = self.channels("scale", "bias", "mean", "var")
        given = {
            "input": self.t("x", *IMAGE),
            "scale": scale,
            "bias": bias,
            "in_running_mean": mean,
            "in_running_var": var,
            "epsilon": 1e-5,
            "momentum": 0.1,
            **changes,
        }
        return self.g.batchnorm(name="bn", **given)

    def quantized(self, *data_types: str) -> Tensor:
        y, scale = self.g.block_scale_quantize(self.t("x", 4, 64), 32, name="q")
        for tensor, data_type in zip((y, scale), data_types, strict=True):
            tensor.set_data_type(data_type)
        return y

    def moe(self, mode: str = "NONE", **changes: object) -> Tensor:
        given = {
            "token": self.t("token", 1, 10, 8),
            "weight": self.t("weight", 3, 8, 16),
            "first_token_offset": self.t("offsets", 3, 1, 1, data_type="INT32"),
            **changes,
        }
        return self.g.moe_grouped_matmul(mode=moe_grouped_matmul_mode[mode], name="moe", **given)


Declare = Callable[[Case], object]
# A case's name -> what declares the graph, and what it is told.
Wrong = dict[str, tuple[Declare, str]]
