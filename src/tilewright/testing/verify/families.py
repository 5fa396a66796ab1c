"""The families by name."""

from __future__ import annotations

from tilewright.testing.verify import (
    attention,
    attention_backward,
    attention_paged,
    attention_ragged,
    convolution,
    norms,
    norms_backward,
    products,
    reductions,
)
from tilewright.testing.verify.case import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        attention.FAMILY,
        attention_backward.FAMILY,
        attention_ragged.FAMILY,
        attention_paged.FAMILY,
        norms.RMS_NORM,
        norms.LAYER_NORM,
        norms_backward.RMS_NORM_BACKWARD,
        norms_backward.LAYER_NORM_BACKWARD,
        products.MATMUL,
        products.GROUPED_MATMUL,
        convolution.CONVOLUTION,
        convolution.CONVOLUTION_BACKWARD,
        products.ROPE,
        products.POINTWISE,
        reductions.REDUCTION,
    )
}
# Names that stand for several.
GROUPS: dict[str, tuple[str, ...]] = {
    "norms": ("rms_norm", "layer_norm", "rms_norm_backward", "layer_norm_backward"),
    "all": tuple(FAMILIES),
}
