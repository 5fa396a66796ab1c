"""Tilewright's attention and norms in the models of Hugging Face Transformers.

    from tilewright.integrations import transformers as tilewright_transformers

    tilewright_transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="tilewright")
    tilewright_transformers.replace_norms(model)

``register`` registers an attention function and, under the same name, a mask function: a model
whose attention function has no mask function gets no mask at all, not even for its padding.

The mask function gives a boolean mask (True = may attend) that is right in itself, or None where
there is nothing to hide but the future. If the mask is a plain causal, sliding or full pattern,
with no padding but on the right, it also says so in an attribute of the mask. The attention
function then passes the pattern and the lengths on in place of the mask, so that an engine can
skip what is hidden. An operation on the mask drops the attribute, an in-place change outdates it,
and either way the mask itself is passed on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tilewright import ops
from tilewright.errors import BindingError
from tilewright.integrations.norms import replace_norms, restore_norms

__all__ = [
    "NAME",
    "attention_forward",
    "attention_mask",
    "register",
    "replace_norms",
    "restore_norms",
]

NAME = "tilewright"
# The attribute of a mask that holds its MaskPattern.
_PATTERN = "_tilewright_pattern"


def register(name: str = NAME) -> None:
    """Make ``attn_implementation=name`` select Tilewright's attention, in this process.

    Registering a name again is harmless.

    Raises:
        ModuleNotFoundError: if the package ``transformers`` is not installed.
        ImportError: if it is too old to let mask functions be registered.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "tilewright.integrations.transformers.register() needs the package 'transformers', "
            "which is not installed: pip install 'tilewright[transformers]'",
            name="transformers",
        ) from error
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "tilewright.integrations.transformers.register() needs a version of 'transformers' "
            f"with AttentionInterface and AttentionMaskInterface; got {transformers.__version__}",
            name="transformers",
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


@dataclass(frozen=True)
class MaskPattern:
    """What a boolean mask of shape (B, 1, q_length, kv_length) says, in the words of ``ops.sdpa``.

    ``left`` is how many keys before its own a row sees (None: all). ``seqlens_kv`` is (B,) int32,
    the number of keys of each sequence, or None if all are there. ``version`` is that of the mask
    when it was made: a mask that was changed in place since has another.
    """

    causal: bool
    align: str
    left: int | None
    seqlens_kv: torch.Tensor | None
    version: int


def attention_mask(**arguments: Any) -> torch.Tensor | None:
    """The mask that Transformers asks for once a forward: (B, 1, q_length, kv_length), or None.

    Arguments and result are those of ``transformers.masking_utils.sdpa_mask``.
    """
    from transformers import masking_utils

    mask: torch.Tensor | None
    if "q_length" not in arguments:
        # Older versions give the positions of the rows; their mask is passed on as it is.
        mask = masking_utils.sdpa_mask(**arguments)
        return mask
    padding = arguments.get("attention_mask")
    tracing = masking_utils.is_tracing(padding)
    # A tensor made in inference mode counts no changes, so its pattern could be stale.
    with contextlib.nullcontext() if tracing else torch.inference_mode(False), torch.no_grad():
        mask = masking_utils.sdpa_mask(**arguments)
    # Traced code must not depend on values, and a traced tensor keeps no attributes.
    if mask is None or tracing or mask.is_inference():
        return mask
    pattern = _find_pattern(mask, padding, arguments, masking_utils)
    if pattern is not None:
        setattr(mask, _PATTERN, pattern)
    return mask


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as a Transformers model calls it; returns ((B, Sq, Hq, Dv), None).

    query is (B, Hq, Sq, D), key (B, Hkv, Skv, D), value (B, Hkv, Skv, Dv). ``attention_mask`` is
    boolean (True = may attend) or added to the scores; it and ``position_bias`` broadcast to
    (B, Hq, Sq, Skv). With no mask the attention is causal from the top left if ``is_causal``, or
    else the module's own ``is_causal``, says so and there is more than one row. ``softcap`` caps
    the scores, ``s_aux`` is a sink a head, (Hq,). No attention weights are returned.

    Raises:
        BindingError: if the mask is neither boolean nor of a float type, or ``head_mask`` is given.
    """
    if others.get("head_mask") is not None:
        raise BindingError("head_mask: given; expected None: heads cannot be masked here")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if query.shape[0] != key.shape[0]:
        # Learned queries come once for all sequences.
        query = query.expand(key.shape[0], -1, -1, -1)
    options = _mask_options(attention_mask, is_causal, query.shape[2], key.shape[2])
    keys = options.pop("keys", key.shape[2])
    if keys != key.shape[2]:
        key, value = key[:, :, :keys], value[:, :, :keys]
    if position_bias is not None:
        added = options.get("bias")
        position_bias = position_bias[..., :keys]
        options["bias"] = position_bias if added is None else position_bias + added
    result = ops.sdpa(
        query,
        key,
        value,
        scale=scaling,
        soft_cap=softcap,
        sink=None if s_aux is None else s_aux.reshape(-1),
        dropout_p=float(dropout),
        **options,
    )
    output = result[0] if isinstance(result, tuple) else result
    return output.transpose(1, 2).contiguous(), None


def _mask_options(
    mask: torch.Tensor | None, is_causal: bool, rows: int, keys: int
) -> dict[str, Any]:
    """The arguments of ``ops.sdpa`` that stand for the mask, and how many keys there are to see."""
    if mask is None:
        if not is_causal or rows == 1:
            return {}
        # More keys than rows: an empty static cache, whose further keys are in the future.
        return {"causal": True, "keys": min(rows, keys)}
    pattern = getattr(mask, _PATTERN, None)
    if pattern is not None and _still_holds(pattern, mask, rows, keys):
        options: dict[str, Any] = {"align": pattern.align}
        if pattern.causal:
            options["causal"] = True
        if pattern.left is not None:
            options["window"] = (pattern.left, None if pattern.causal else pattern.left)
        if pattern.seqlens_kv is not None:
            options["seqlens_kv"] = pattern.seqlens_kv
        return options
    mask = mask[..., :keys]
    if mask.dtype is torch.bool:
        return {"mask": mask}
    if mask.is_floating_point():
        return {"bias": mask}
    raise BindingError(
        f"attention_mask: data type {mask.dtype}; expected torch.bool (True = may attend) or a "
        "float type (added to the scores)"
    )


def _still_holds(pattern: MaskPattern, mask: torch.Tensor, rows: int, keys: int) -> bool:
    """Whether the mask is as it was made, for as many rows and keys as the call has."""
    return mask.shape[-2:] == (rows, keys) and mask._version == pattern.version


def _find_pattern(
    mask: torch.Tensor,
    padding: torch.Tensor | None,
    arguments: Mapping[str, Any],
    masking_utils: Any,
) -> MaskPattern | None:
    """The pattern of the mask that ``arguments`` ask for; None if it is not a plain one.

    ``padding`` is (B, keys), True at tokens.
    """
    q_length, kv_length = arguments["q_length"], arguments["kv_length"]
    q_offset = arguments.get("q_offset", 0)
    # Offsets as tensors belong to caches that are made for tracing.
    if arguments.get("kv_offset", 0) != 0 or not isinstance(q_offset, int):
        return None
    mask_function = arguments.get("mask_function", masking_utils.causal_mask_function)
    shape = _known_shape(mask_function, masking_utils)
    if shape is None:
        return None
    causal, left = shape
    if q_offset == 0 or (not causal and left is None):
        align = "top_left"
    elif q_offset + q_length == kv_length:
        align = "bottom_right"
    else:
        return None
    right_padded, lengths = _lengths(padding, kv_length)
    # Lengths move the diagonal of a bottom-right alignment.
    if not right_padded or (lengths is not None and align == "bottom_right"):
        return None
    return MaskPattern(causal, align, left, lengths, mask._version)


def _known_shape(
    mask_function: Callable[..., Any], masking_utils: Any
) -> tuple[bool, int | None] | None:
    """(causal, keys seen to the left) of a mask function of Transformers; None for another.

    Its sliding windows are closures: they are known by the function that made them, and their
    width is read from the closure. A causal window of W sees W keys, its own included; a window of
    W in both directions sees W keys on each side.
    """
    if mask_function is masking_utils.causal_mask_function:
        return True, None
    if mask_function is masking_utils.bidirectional_mask_function:
        return False, None
    parts = _closure(mask_function, masking_utils.and_masks).get("mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    overlay, base = parts
    if base is masking_utils.causal_mask_function:
        made_by, causal = masking_utils.sliding_window_overlay, True
    elif base is masking_utils.bidirectional_mask_function:
        made_by, causal = masking_utils.sliding_window_bidirectional_overlay, False
    else:
        return None
    width = _closure(overlay, made_by).get("sliding_window")
    if not isinstance(width, int) or width < 1:
        return None
    return causal, width - 1 if causal else width


def _closure(function: Callable[..., Any], maker: Callable[..., Any]) -> dict[str, Any]:
    """What ``function`` closes over, by name, if ``maker`` made it; else nothing."""
    name = getattr(function, "__qualname__", "")
    closure = getattr(function, "__closure__", None)
    if closure is None or not name.startswith(f"{maker.__qualname__}.<locals>."):
        return {}
    if getattr(function, "__module__", None) != maker.__module__:
        return {}
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, closure, strict=True)}


def _lengths(padding: torch.Tensor | None, keys: int) -> tuple[bool, torch.Tensor | None]:
    """(whether all padding is on the right, the lengths (B,) int32 or None if there is none)."""
    if padding is None:
        return True, None
    present = padding.to(torch.bool)[:, :keys]
    if present.shape[1] < keys:
        present = torch.nn.functional.pad(present, (0, keys - present.shape[1]))
    if bool(present.all()):
        return True, None
    # A token after padding: the padding is not only on the right.
    if bool((present[:, 1:] & ~present[:, :-1]).any()):
        return False, None
    return True, present.sum(dim=-1, dtype=torch.int32)
