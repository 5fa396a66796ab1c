"""The Hopper engine: Gluon kernels for SM90, and the compiler versions that take them."""

from __future__ import annotations

from tilewright.engines.compiled.engine import CompiledEngine

# Kind of a graph's principal operation -> the module here that takes such graphs.
_FAMILIES: dict[str, str] = {
    "sdpa": "attention",
    "sdpa_backward": "attention_backward",
    "sdpa_fp8": "attention_fp8",
}

# Gluon differs from version to version of Triton: these kernels are compiled with these.
ENGINE = CompiledEngine(
    "tilewright.engines.hopper", _FAMILIES, oldest=(3, 6), newest=(3, 7), can_interpret=False
)
