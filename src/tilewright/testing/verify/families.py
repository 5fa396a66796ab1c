"""The families by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.testing.detectors.subject import Tensors
from tilewright.testing.verify import attention, norms, products
from tilewright.testing.verify.case import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        attention.FAMILY,
        norms.RMS_NORM,
        norms.LAYER_NORM,
        products.MATMUL,
        products.ROPE,
        products.POINTWISE,
    )
}
# Names that stand for several.
GROUPS: dict[str, tuple[str, ...]] = {"norms": ("rms_norm", "layer_norm"), "all": tuple(FAMILIES)}

# How operands are given to a graph, where that differs from how a callable gets them.
FOR_GRAPH: dict[str, Callable[[Tensors], dict[str, torch.Tensor]]] = {
    "attention": attention.for_graph,
    "rms_norm": norms.for_graph,
    "layer_norm": norms.for_graph,
}
