"""The Triton engine: which kernel family takes which operation."""

from __future__ import annotations

from tilewright.engines.compiled.engine import CompiledEngine, interpreting

__all__ = ["ENGINE", "interpreting"]

# Kind of a graph's principal operation -> the module here that takes such graphs.
_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("rmsnorm", "layernorm", "adalayernorm", "instancenorm"), "normalization"),
    **dict.fromkeys(("batchnorm", "batchnorm_inference"), "normalization"),
    **dict.fromkeys(
        ("rmsnorm_backward", "layernorm_backward", "adalayernorm_backward"),
        "normalization_backward",
    ),
    **dict.fromkeys(("instancenorm_backward", "batchnorm_backward"), "group_backward"),
    **dict.fromkeys(("rope", "rope_backward"), "rope"),
    "chain": "pointwise",
    "sdpa": "attention",
    "sdpa_backward": "attention_backward",
}

ENGINE = CompiledEngine("tilewright.engines.triton", _FAMILIES)
