"""The operation methods of a graph, each loaded with its family's file at first use.

A program that declares norms has no need to wait for attention. Type checkers see plain classes;
at run time ``OperationMethods`` has for each method a descriptor that loads the family and puts the
family's functions in place of all its descriptors.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tilewright.graph.builder import Builder

__all__ = ["FAMILIES", "OperationMethods", "load_families"]

_UNARY = "abs ceil cos erf exp floor gelu gelu_approx_tanh identity log logical_not neg reciprocal"
_UNARY += " rsqrt sigmoid sin sqrt tan tanh elu softplus swish relu leaky_relu gen_index"
_BINARY = "add sub mul div add_square logical_and logical_or max min mod pow bias scale cmp_eq"
_BINARY += " cmp_neq cmp_gt cmp_ge cmp_lt cmp_le binary_select"
_BACKWARD = "relu leaky_relu tanh sigmoid elu gelu gelu_approx_tanh softplus swish"

# Module of this package -> (its class, the public methods of that class).
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "attention": (
        "AttentionMethods",
        (
            "sdpa",
            "sdpa_backward",
            "sdpa_fp8",
            "sdpa_fp8_backward",
            "sdpa_mxfp8",
            "sdpa_mxfp8_backward",
        ),
    ),
    "batchnorm": (
        "BatchnormMethods",
        ("batchnorm", "batchnorm_inference", "batchnorm_backward"),
    ),
    "block_scale": ("BlockScaleMethods", ("block_scale_dequantize", "block_scale_quantize")),
    "convolution": ("ConvolutionMethods", ("conv_fprop", "conv_dgrad", "conv_wgrad")),
    "genstats": ("GenstatsMethods", ("genstats",)),
    "matmul": ("MatmulMethods", ("matmul",)),
    "moe": ("MoeMethods", ("moe_grouped_matmul", "moe_grouped_matmul_bwd")),
    "normalization": (
        "NormalizationMethods",
        ("layernorm", "instancenorm", "adalayernorm", "rmsnorm"),
    ),
    "normalization_backward": (
        "NormalizationBackwardMethods",
        (
            "layernorm_backward",
            "instancenorm_backward",
            "adalayernorm_backward",
            "rmsnorm_backward",
        ),
    ),
    "pointwise_backward": (
        "PointwiseBackwardMethods",
        tuple(f"{name}_backward" for name in _BACKWARD.split()),
    ),
    "pointwise_binary": ("PointwiseBinaryMethods", tuple(_BINARY.split())),
    "pointwise_unary": ("PointwiseUnaryMethods", tuple(_UNARY.split())),
    "reduction": ("ReductionMethods", ("reduction",)),
    "rope": ("RopeMethods", ("rope", "rope_backward")),
    "shape": ("ShapeMethods", ("reshape", "transpose", "concatenate", "slice")),
}


def load_families() -> None:
    """Import every family, so that every kind of operation is known."""
    for module in FAMILIES:
        importlib.import_module(f"{__package__}.{module}")


if TYPE_CHECKING:
    from tilewright.graph.operations.attention import AttentionMethods
    from tilewright.graph.operations.batchnorm import BatchnormMethods
    from tilewright.graph.operations.block_scale import BlockScaleMethods
    from tilewright.graph.operations.convolution import ConvolutionMethods
    from tilewright.graph.operations.genstats import GenstatsMethods
    from tilewright.graph.operations.matmul import MatmulMethods
    from tilewright.graph.operations.moe import MoeMethods
    from tilewright.graph.operations.normalization import NormalizationMethods
    from tilewright.graph.operations.normalization_backward import NormalizationBackwardMethods
    from tilewright.graph.operations.pointwise_backward import PointwiseBackwardMethods
    from tilewright.graph.operations.pointwise_binary import PointwiseBinaryMethods
    from tilewright.graph.operations.pointwise_unary import PointwiseUnaryMethods
    from tilewright.graph.operations.reduction import ReductionMethods
    from tilewright.graph.operations.rope import RopeMethods
    from tilewright.graph.operations.shape import ShapeMethods

    class OperationMethods(
        AttentionMethods,
        BatchnormMethods,
        BlockScaleMethods,
        ConvolutionMethods,
        GenstatsMethods,
        MatmulMethods,
        MoeMethods,
        NormalizationBackwardMethods,
        NormalizationMethods,
        PointwiseBackwardMethods,
        PointwiseBinaryMethods,
        PointwiseUnaryMethods,
        ReductionMethods,
        RopeMethods,
        ShapeMethods,
    ):
        """The methods of every family."""

else:

    class OperationMethods(Builder):
        """The methods of every family; see the module."""

    class _Late:
        """Stands for a method until it is asked for."""

        __slots__ = ("class_name", "module", "name")

        def __init__(self, module: str, class_name: str, name: str) -> None:
            self.module, self.class_name, self.name = module, class_name, name

        def __get__(self, instance: Any, owner: Any) -> Any:
            """Load the family and hand out its method."""
            module = importlib.import_module(f"{__package__}.{self.module}")
            for base in reversed(getattr(module, self.class_name).__mro__):
                # The family's own classes, its private methods among theirs.
                if issubclass(base, Builder) and base is not Builder:
                    for name, value in vars(base).items():
                        if not name.startswith("__"):
                            setattr(OperationMethods, name, value)
            return getattr(owner if instance is None else instance, self.name)

    for _module, (_class_name, _names) in FAMILIES.items():
        for _name in _names:
            setattr(OperationMethods, _name, _Late(_module, _class_name, _name))
