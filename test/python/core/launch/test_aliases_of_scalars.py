"""B7: a scalar result over another operand is found on the caller's buffers, before any copy.

ATen's plans make temporaries of what they compute in; an alias that is looked for among those, or
after them, is missed, and the scalar lands in the caller's tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.torch_dtypes import to_torch

pytestmark = pytest.mark.L0

DIM = (1, 2, 8, 16)


def fp8_attention() -> Any:
    """Results O, Amax_S and Amax_O of q, k and v in 8 bits."""
    graph = tw.Graph(io_data_type="FP8_E4M3", intermediate_data_type="float32")
    q, k, v = (graph.tensor(DIM, name=name) for name in "qkv")
    scales = {
        name: graph.tensor((1, 1, 1, 1), data_type="float32", name=name)
        for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    }
    o, _, *amax = graph.sdpa_fp8(q, k, v, **scales, is_inference=True, attn_scale=0.25)
    o.set_output(True).set_name("o")
    for name, tensor in zip(("amax_s", "amax_o"), amax, strict=True):
        tensor.set_output(True).set_name(name).set_data_type("float32")
    return graph


def quantization() -> Any:
    """Results y and the scales of its blocks."""
    graph = tw.Graph(io_data_type="float32", intermediate_data_type="float32")
    x = graph.tensor((4, 64), name="x")
    y, scale = graph.block_scale_quantize(x, 32, 1)
    y.set_output(True).set_name("y").set_data_type("FP8_E4M3")
    scale.set_output(True).set_name("scale").set_data_type("FP8_E8M0")
    return graph


def pack_of(graph: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pack = {
        t.name: (torch.rand(t.dim, generator=generator) + 0.5).to(to_torch(t.data_type))
        for t in graph.inputs()
    }
    return pack | {
        t.name: torch.full(t.dim, 2.0).to(to_torch(t.data_type)) for t in graph.outputs()
    }


def within(buffer: torch.Tensor, like: torch.Tensor, start: int) -> torch.Tensor:
    """A result like ``like`` in the bytes of another operand."""
    flat = buffer.view(torch.uint8).flatten()[start : start + like.nbytes]
    return flat.view(like.dtype).view(like.shape)


def name_of(part: Any) -> str:
    return getattr(part, "__name__", part)


CASES = [
    *((fp8_attention, f"amax_{which}", over) for which in "so" for over in ("q", "v", "o")),
    (fp8_attention, "amax_o", "amax_s"),
    (quantization, "scale", "x"),
    (quantization, "scale", "y"),
]


@pytest.mark.parametrize(
    ("declare", "result", "over"), CASES, ids=lambda x: getattr(x, "__name__", x)
)
def test_a_scalar_over_an_operand_is_refused_before_any_copy(
    declare: Any, result: str, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = declare()
    graph.build()
    assert graph.selected_engine == "aten"
    size = graph.get_workspace_size()
    workspace = torch.full((size,), 0xAB, dtype=torch.uint8)
    pack = pack_of(graph)
    graph.execute(pack, workspace)
    assert not torch.equal(pack[result].float(), torch.full(pack[result].shape, 2.0))
    pack = pack_of(graph)
    last = pack[over].nbytes - pack[result].nbytes
    for start in {0, last // 8 * 8}:
        wrong = {**pack, result: within(pack[over], pack[result], start)}
        before = {name: tensor.clone() for name, tensor in wrong.items()}

        def tripwire(*_: object, **__: object) -> Any:
            raise AssertionError("the call went on to its conversions")

        with monkeypatch.context() as armed:
            for name in ("clone", "float", "double", "copy_", "to"):
                armed.setattr(torch.Tensor, name, tripwire)
            for run in (graph.execute, graph.bind):
                with pytest.raises(tw.BindingError, match=f"'({result}|{over})'.*overlap"):
                    run(wrong, workspace)
        for name, tensor in wrong.items():
            same = torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
            assert same, f"{name} was written"


def test_disjoint_parts_of_one_allocation_are_no_alias() -> None:
    graph = fp8_attention()
    graph.build()
    pack = pack_of(graph)
    storage = torch.zeros(4096, dtype=torch.uint8)
    parts, at = dict(pack), 0
    for name, tensor in pack.items():
        part = within(storage, tensor, at)
        parts[name] = part.copy_(tensor)
        at += -(-tensor.nbytes // 16) * 16
    workspace = torch.zeros(graph.get_workspace_size(), dtype=torch.uint8)
    for each in (pack, parts):
        graph.execute(each, workspace)
    assert all(torch.equal(pack[n].float(), parts[n].float()) for n in ("o", "amax_s", "amax_o"))
