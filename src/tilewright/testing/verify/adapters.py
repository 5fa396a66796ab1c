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


def torch_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Autograd through ``scaled_dot_product_attention``."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        o = torch_sdpa(*leaves, causal=causal, scale=scale, lengths=lengths)
    return torch.autograd.grad(o, leaves, do)


torch_attention_backward.verify_deviations = {  # type: ignore[attr-defined]
    "rows_without_keys": "PyTorch documents no gradient for rows that its mask hides all keys from",
    "L1": "autograd converts a gradient of another type",
    "masked_nan": "PyTorch adds -inf to hidden scores and multiplies by weights of 0, so NaN in "
    "hidden keys or values reaches the gradients",
}


def torch_attention_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """``scaled_dot_product_attention`` of one sequence after another; it reads the lengths here."""
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for b in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        part = (t[s].transpose(0, 1)[None] for t, s in ((q, rows), (k, keys), (v, keys)))
        o[rows] = torch_sdpa(*part, causal=causal, scale=scale)[0].transpose(0, 1)
    return o


torch_attention_ragged.verify_deviations = {  # type: ignore[attr-defined]
    "L1": "a loop in Python slices what it gets, and sees little of what is wrong with it",
    "L3": "a loop in Python reads the lengths on the host",
}


def torch_attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    v_table: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Pages gathered by index, then ``scaled_dot_product_attention`` under a boolean mask."""
    k, v = (
        pages[entries.long()].flatten(1, 2).transpose(1, 2)
        for pages, entries in ((k_pages, table), (v_pages, table if v_table is None else v_table))
    )
    column = torch.arange(k.shape[2], device=q.device)
    last = lengths.long()[:, None] - 1
    if causal:
        last = last - torch.arange(q.shape[2] - 1, -1, -1, device=q.device)
    seen = column <= last[..., None]
    mask = seen[:, None] if causal else seen[:, None, None, 0]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


torch_attention_paged.verify_deviations = {  # type: ignore[attr-defined]
    "L1": "PyTorch converts a table of another type, and broadcasts lengths",
    "masked_nan": "PyTorch adds -inf to hidden scores and multiplies by weights of 0, so NaN in "
    "unused slots reaches the result",
}


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5) -> torch.Tensor:
    """``torch.nn.functional.rms_norm`` over the last axis."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def torch_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, eps: float = 1e-5
) -> torch.Tensor:
    """``torch.nn.functional.layer_norm`` over the last axis."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def torch_rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5
) -> tuple[torch.Tensor, ...]:
    """Autograd through ``torch.nn.functional.rms_norm``, in the wider of the two types."""
    return _through(torch_rms_norm, dy, (x, weight), eps)


def torch_layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-5
) -> tuple[torch.Tensor, ...]:
    """Autograd through ``torch.nn.functional.layer_norm``, in the wider of the two types."""
    return _through(torch_layer_norm, dy, (x, weight, torch.zeros_like(weight)), eps)


def _through(
    norm: Any, dy: torch.Tensor, operands: tuple[torch.Tensor, ...], eps: float
) -> tuple[torch.Tensor, ...]:
    wide = torch.promote_types(operands[0].dtype, operands[1].dtype)
    if dy.shape != operands[0].shape:
        raise ValueError(f"dy: {tuple(dy.shape)}, x: {tuple(operands[0].shape)}")
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in operands]
        y = norm(*(leaf.to(wide) for leaf in leaves), eps=eps)
    return torch.autograd.grad(y, leaves, dy.to(wide))


def torch_convolution(
    x: torch.Tensor, weight: torch.Tensor, *, padding: int = 0, stride: int = 1, dilation: int = 1
) -> torch.Tensor:
    """``torch.nn.functional.conv1d``, ``conv2d`` or ``conv3d``."""
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[x.dim() - 3]
    groups = x.shape[1] // weight.shape[1]
    result: torch.Tensor = convolve(x, weight, None, stride, padding, dilation, groups)
    return result


def torch_convolution_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    padding: int = 0,
    stride: int = 1,
    dilation: int = 1,
) -> tuple[torch.Tensor, ...]:
    """Autograd through ``torch_convolution``."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
        y = torch_convolution(*leaves, padding=padding, stride=stride, dilation=dilation)
    return torch.autograd.grad(y, leaves, dy)


def torch_grouped_matmul(
    x: torch.Tensor, weights: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """A product a group; it reads the starts on the host."""
    if starts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"starts: {starts.dtype}")
    y = torch.zeros(x.shape[0], weights.shape[2], dtype=x.dtype, device=x.device)
    ends = starts.tolist()
    for group, weight in enumerate(weights):
        rows = slice(ends[group], ends[group + 1])
        y[rows] = x[rows] @ weight
    return y


torch_grouped_matmul.verify_deviations = {  # type: ignore[attr-defined]
    "L3": "a loop in Python reads the starts on the host",
}


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


def torch_reduction(mode: str, x: torch.Tensor, *, axes: tuple[int, ...]) -> torch.Tensor:
    """torch's function of the same meaning, over one axis after another where it takes but one."""
    if mode == "norm1":
        return x.abs().sum(axes, keepdim=True)
    if mode == "norm2":
        return x.float().square().sum(axes, keepdim=True).sqrt().to(x.dtype)
    if mode == "amax":
        return x.abs().amax(axes, keepdim=True)
    if mode == "mul_no_zeros":
        mode, x = "mul", torch.where(x == 0, torch.ones_like(x), x)
    if mode == "mul":
        for axis in axes:
            x = x.prod(axis, keepdim=True)
        return x
    names: dict[str, Any] = {"add": x.sum, "avg": x.mean, "max": x.amax, "min": x.amin}
    result: torch.Tensor = names[mode](axes, keepdim=True)
    return result
