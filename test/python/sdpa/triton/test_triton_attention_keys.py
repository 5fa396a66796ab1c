"""B17, A2: what of a declaration is in the key of attention's code, so that other extents need no
compiler, and other code is never taken for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.L0

CHILD = """
import json, os
os.environ.pop("TRITON_INTERPRET", None)
import tilewright as tw
from tilewright.engines.compiled.code_cache import key_of
from tilewright.engines.triton import attention, attention_backward

def declare(is_backward, rows, keys, batch=2, heads=(4, 2), dtype="bfloat16", total=None, **masks):
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    q, o, d_o = (graph.tensor((batch, heads[0], rows, 64)) for _ in range(3))
    k, v = (graph.tensor((batch, heads[1], keys, 64)) for _ in range(2))
    masks["use_alibi_mask"] = masks.pop("alibi", False)
    if masks.pop("lengths", False):
        length = graph.tensor((batch, 1, 1, 1), data_type="int32")
        masks |= dict(use_padding_mask=True, seq_len_q=length, seq_len_kv=length)
    if is_backward:
        stats = graph.tensor((batch, heads[0], rows, 1), data_type="float32")
        made = graph.sdpa_backward(q, k, v, o, d_o, stats, attn_scale=0.1, **masks)
    else:
        made = graph.sdpa(q, k, v, is_inference=True, attn_scale=0.1, **masks)[:1]
    for tensor in made:
        tensor.set_output(True)
    graph.validate()
    return graph

def digests(is_backward, *arguments, target=(9, 0), **options):
    family = attention_backward if is_backward else attention
    plan = family.plan(declare(is_backward, *arguments, **options), (), 132)
    return [key_of(kernel.spec, target).digest() for kernel in plan.kernels]

causal = {"use_causal_mask": True}
print(json.dumps({
    "forward": [
        digests(False, 300, keys, batch, heads, **causal)
        for keys, batch, heads in ((300, 2, (4, 2)), (113, 2, (4, 2)), (1000, 7, (12, 4)))
    ],
    "any loop": [digests(False, 300, keys, alibi=True, **causal) for keys in (300, 384, 64)],
    "lengths": [digests(False, rows, rows, lengths=True) for rows in (300, 301, 777)],
    "decoding": [digests(False, 1, keys, heads=(8, 2), lengths=True) for keys in (700, 1024, 5001)],
    "backward": [digests(True, 300, keys, **causal) for keys in (300, 113, 777)],
    "others": [
        digests(False, 300, 300, **causal),
        digests(False, 300, 300),
        digests(False, 300, 300, dtype="float16", **causal),
        digests(False, 300, 300, target=(8, 0), **causal),
        digests(False, 300, 300, sliding_window_length=7, **causal),
        digests(False, 300, 300, lengths=True, **causal),
        digests(True, 300, 300, **causal),
    ],
}))
"""


def test_extents_are_in_no_key_and_other_code_is_in_another(run_python: Callable[..., str]) -> None:
    found = json.loads(run_python(CHILD))
    for name in ("forward", "any loop", "lengths", "decoding", "backward"):
        assert len(set(map(tuple, found[name]))) == 1, name
    others = [digest for digests in found["others"] for digest in digests]
    assert len(set(others)) == len(others)
