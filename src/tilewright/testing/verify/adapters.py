"""PyTorch's own functions as callables of a family, for ``--target``.

``verify_deviations`` on a callable names, by a case's tag or by a rule, what it is known to do
otherwise: a broken verdict there is reported as "deviates", with this text, and does not fail the
run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from tilewright.errors import NotSupportedError


def torch_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``; lengths become a boolean mask.

    Raises:
        NotSupportedError: for a scale in a tensor.
    """
    if isinstance(scale, torch.Tensor):
        raise NotSupportedError("scaled_dot_product_attention documents scale as a float")
    if lengths is not None:
        seen = torch.arange(k.shape[2], device=k.device)[None, :] < lengths[:, None]
        mask = seen[:, None, None, :]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


torch_sdpa.verify_deviations = {  # type: ignore[attr-defined]
    "rows_without_keys": "PyTorch documents no value for rows that its mask hides all keys from",
    "L1": "PyTorch does not check on every path that k and v have one length",
    "masked_nan": "PyTorch adds -inf to hidden scores and multiplies by weights of 0, so NaN in "
    "hidden keys or values reaches the result",
}


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """``torch.nn.functional.rms_norm`` over the last axis."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm`` over the last axis."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def torch_matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``torch.matmul``."""
    return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)


torch_matmul.verify_deviations = {  # type: ignore[attr-defined]
    "L6": "PyTorch does not refuse every out= that overlaps an operand of a product",
}


def torch_rope(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    """The usual eager rotation, as models write it: x * cos + rotate_half(x) * sin."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * freqs.cos() + turned * freqs.sin()).to(x.dtype)


def torch_pointwise(mode: str, *inputs: torch.Tensor) -> torch.Tensor:
    """torch's function of the same meaning."""
    names: dict[str, Any] = {
        "max": torch.maximum,
        "min": torch.minimum,
        "relu": torch.relu,
        "gelu": functional.gelu,
        "gelu_approx_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    }
    result: torch.Tensor = (names.get(mode) or getattr(torch, mode))(*inputs)
    return result
