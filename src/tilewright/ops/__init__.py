"""Functions on torch tensors: attention, norms, rotary embedding, linear and causal layers.

Each builds a graph once for what it was called with, keeps the plan, and has autograd through the
graph's own backward operations.
"""

from tilewright.ops.attention import sdpa as sdpa
from tilewright.ops.attention import sdpa_decode as sdpa_decode
from tilewright.ops.attention_packed import sdpa_varlen as sdpa_varlen
from tilewright.ops.attention_paged import sdpa_paged as sdpa_paged
from tilewright.ops.attention_states import merge_states as merge_states
from tilewright.ops.causal_convolution import conv1d_causal as conv1d_causal
from tilewright.ops.causal_convolution import conv1d_causal_update as conv1d_causal_update
from tilewright.ops.grouped_norm import group_norm as group_norm
from tilewright.ops.normalization import layer_norm as layer_norm
from tilewright.ops.normalization import rms_norm as rms_norm
from tilewright.ops.plan_cache import cached_explanations as cached_explanations
from tilewright.ops.plan_cache import clear_plan_cache as clear_plan_cache
from tilewright.ops.products import linear as linear
from tilewright.ops.quantization import dequantize as dequantize
from tilewright.ops.quantization import quantize as quantize
from tilewright.ops.rotary import rope as rope

__all__ = [
    "cached_explanations",
    "clear_plan_cache",
    "conv1d_causal",
    "conv1d_causal_update",
    "dequantize",
    "group_norm",
    "layer_norm",
    "linear",
    "merge_states",
    "quantize",
    "rms_norm",
    "rope",
    "sdpa",
    "sdpa_decode",
    "sdpa_paged",
    "sdpa_varlen",
]
