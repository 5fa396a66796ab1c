"""Few queries over many keys: every edge of a length, a page and a run, held to float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from attention_cases.running import select_split

import tilewright as tw
from tilewright.engines.compiled.planned import without_unreached
from tilewright.engines.triton import attention, attention_decode_config
from tilewright.graph.enums import knob_type

pytestmark = pytest.mark.usefixtures("interpreted")

HAS_GPU = os.path.exists("/dev/nvidiactl")
DEVICE = "cuda" if HAS_GPU else "cpu"
PAGE = 16
KEYS = 530
# The edges of a page, of a block of keys and of a run of blocks; nothing, one key, and all.
LENGTHS = ([0, 1, PAGE - 1, KEYS], [PAGE, PAGE + 1, 0, 129], [255, 256, 257, KEYS - 1])
HEADS, DEPTH = (4, 1), 16
GUARD = 64


class Decode:
    """One declared call with operands that hold NaN wherever no length reaches."""

    def __init__(
        self,
        rows: int,
        lengths: list[int],
        *,
        page: int = 0,
        depth: int = DEPTH,
        depth_v: int = DEPTH,
        heads: tuple[int, int] = HEADS,
        dtype: torch.dtype = torch.float16,
        is_split: bool = True,
        **masks: Any,
    ) -> None:
        self.lengths, self.rows, self.page = lengths, rows, page
        self.depth, self.depth_v = depth, depth_v
        self.heads, heads_kv = heads
        self.group = self.heads // heads_kv
        self.is_causal, self.is_split = bool(masks), is_split
        generator = torch.Generator().manual_seed(rows + page)
        self.batch = batch = len(lengths)
        self.graph = tw.Graph(io_data_type=dtype, handle=tw.create_handle(DEVICE))
        self.q = torch.randn(batch, self.heads, rows, depth, generator=generator).to(dtype)
        self.k, self.v = (
            torch.randn(batch, heads_kv, KEYS, width, generator=generator).to(dtype)
            for width in (depth, depth_v)
        )
        used = torch.arange(KEYS) < torch.tensor(lengths)[:, None]
        buffers = {"q": self.q, "len_q": torch.full((batch, 1, 1, 1), rows).int()}
        buffers["len_kv"] = torch.tensor(lengths).int().view(-1, 1, 1, 1)
        for name, x in (("k", self.k), ("v", self.v)):
            hidden = x.masked_fill(~used[:, None, :, None], torch.nan)
            if not page:
                buffers[name] = hidden
                continue
            entries = -(-KEYS // page)
            width = x.shape[3]
            whole = torch.full((batch, heads_kv, entries * page, width), torch.nan, dtype=dtype)
            whole[:, :, :KEYS] = hidden
            order = torch.randperm(batch * entries, generator=generator)
            container = torch.empty(batch * entries, heads_kv, page, width, dtype=dtype)
            pages = whole.view(batch, heads_kv, entries, page, width).transpose(1, 2)
            container[order] = pages.reshape(-1, heads_kv, page, width)
            table = order.view(batch, 1, entries, 1).int()
            for number, length in enumerate(lengths):
                # An entry that no key needs names no page.
                table[number, 0, -(-length // page) :] = 2**30
            buffers[name], buffers[f"{name}_table"] = container, table
        self.pack, declared = {}, {}
        for name, buffer in buffers.items():
            tensor = self.graph.tensor(buffer.shape, buffer.stride(), buffer.dtype, name=name)
            declared[name], self.pack[tensor] = tensor, buffer.to(DEVICE)
        masks |= {"seq_len_q": declared["len_q"], "seq_len_kv": declared["len_kv"]}
        if page:
            masks |= {f"paged_attention_{x}_table": declared[f"{x}_table"] for x in "kv"}
            masks["paged_attention_max_seq_len_kv"] = KEYS
        o, stats = self.graph.sdpa(
            *(declared[name] for name in "qkv"),
            attn_scale=depth**-0.5,
            generate_stats=True,
            use_padding_mask=True,
            **masks,
        )
        o.set_output(True)
        stats.set_output(True).set_data_type("float32")
        self.o, self.stats = o, stats
        self.graph.deselect_engines(["hopper"])
        # A device may prefer one run of keys as few as these.
        select_split(self.graph)
        self.graph.build()
        assert self.graph.selected_engine == "triton", self.graph.explain()

    def run(self, fill: int = 0xAB) -> tuple[torch.Tensor, torch.Tensor]:
        """O and Stats; every byte around them and around the workspace is as it was."""
        size = self.graph.get_workspace_size()
        assert (size > 0) == self.is_split
        raw = torch.full((size + 2 * 256,), fill, dtype=torch.uint8, device=DEVICE)
        outs = {}
        for tensor, width, dtype in (
            (self.o, self.depth_v, self.q.dtype),
            (self.stats, 1, torch.float32),
        ):
            count = self.batch * self.heads * self.rows * width
            outs[tensor] = torch.full((count + 2 * GUARD,), 77.0, dtype=dtype, device=DEVICE)
        inner = {
            tensor: x[GUARD:-GUARD].view(self.batch, self.heads, self.rows, -1)
            for tensor, x in outs.items()
        }
        self.graph.execute({**self.pack, **inner}, raw[256:-256])
        assert (raw[:256] == fill).all() and (raw[-256:] == fill).all()
        for x in outs.values():
            assert (x[:GUARD] == 77.0).all() and (x[-GUARD:] == 77.0).all()
        return inner[self.o].cpu(), inner[self.stats].cpu()

    def check(self, o: torch.Tensor, stats: torch.Tensor) -> None:
        """Against float64, a row at a time."""
        for batch, length in enumerate(self.lengths):
            for head in range(self.heads):
                kv = head // self.group
                scores = self.q[batch, head].double() @ self.k[batch, kv, :length].double().T
                scores *= self.depth**-0.5
                for row in range(self.rows):
                    # Row r of the last ``rows`` sees the keys up to its own.
                    seen = length - (self.rows - 1 - row) if self.is_causal else length
                    if seen <= 0:
                        assert not o[batch, head, row].any()
                        assert stats[batch, head, row] == -torch.inf
                        continue
                    visible = scores[row, :seen]
                    want = visible.softmax(-1) @ self.v[batch, kv, :seen].double()
                    error = (o[batch, head, row].double() - want).abs().max()
                    bound = torch.finfo(self.q.dtype).eps * 2 * max(1.0, want.abs().max())
                    assert error <= bound, (batch, head, row, length)
                    error = (stats[batch, head, row].double() - visible.logsumexp(-1)).abs().max()
                    assert error <= 1e-4, (batch, head, row, length)


@pytest.mark.L0
@pytest.mark.parametrize("page", [0, PAGE])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_at_every_edge(lengths: list[int], rows: int, page: int) -> None:
    call = Decode(rows, lengths, page=page)
    call.check(*call.run())


# (heads, queries) of which a key head's are more than one tile holds, whole tiles and not.
SEVERAL_TILES = [((5, 1), 13), ((9, 1), 16), ((24, 2), 6), ((70, 1), 1), ((4, 1), 16), ((66, 1), 2)]


@pytest.mark.parametrize("page", [0, PAGE])
@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        pytest.param(heads, rows, marks=pytest.mark.L0 if number < 3 else pytest.mark.L1)
        for number, (heads, rows) in enumerate(SEVERAL_TILES)
    ],
)
def test_queries_of_several_tiles(heads: tuple[int, int], rows: int, page: int) -> None:
    lengths = [KEYS - 1]
    if HAS_GPU or heads[0] * rows <= 128:
        # Of so few tiles the keys of more sequences are split.
        lengths = [2, KEYS - 1] if not HAS_GPU else [2, PAGE + 1, 0, KEYS - 1]
    call = Decode(rows, lengths, page=page, heads=heads, use_causal_mask_bottom_right=True)
    call.check(*call.run())


@pytest.mark.L0
@pytest.mark.parametrize("page", [0, PAGE])
def test_queries_of_several_tiles_of_whole_sequences(page: int) -> None:
    # As many as there are programs for: no keys are split.
    lengths = [2, PAGE + 1, 0, KEYS - 1] * (40 if HAS_GPU else 1)
    masks = {"use_causal_mask_bottom_right": True, "is_split": False}
    call = Decode(13, lengths, page=page, heads=(5, 1), **masks)
    call.check(*call.run())


@pytest.mark.L1
@pytest.mark.parametrize("page", [0, 1, PAGE, 128])
@pytest.mark.parametrize("rows", range(1, 17))
def test_each_number_of_queries(rows: int, page: int) -> None:
    call = Decode(rows, LENGTHS[rows % 3], page=page)
    call.check(*call.run())


# Head sizes, queries and pages of the kernel of one warp a program.
ONE_WARP = [((128, 128), rows, page) for rows in (1, 2, 3, 4) for page in (0, 1, PAGE, 24, 128)]
ONE_WARP += [
    (depth, rows, page)
    for depth in ((64, 64), (64, 128), (128, 64))
    for rows, page in ((1, 0), (2, PAGE), (4, 24))
]


@pytest.mark.L1
@pytest.mark.parametrize(("depth", "rows", "page"), ONE_WARP, ids=str)
def test_keys_that_go_into_registers(
    depth: tuple[int, int], rows: int, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the parts of SM90 one warp a program, of 8 or 16 rows with all heads of a key head."""
    # So little would not be worth it.
    monkeypatch.setattr(attention_decode_config, "pays_in_registers", lambda *_: True)
    dtype = torch.bfloat16 if rows % 2 else torch.float16
    call = Decode(rows, LENGTHS[rows % 3], page=page, depth=depth[0], depth_v=depth[1], dtype=dtype)
    if HAS_GPU and torch.cuda.get_device_capability()[0] == 9:
        split = next(x for x in call.graph.plans if dict(x.knobs).get(knob_type.SPLIT_K, 0) > 1)
        count = torch.cuda.get_device_properties(0).multi_processor_count
        plan = attention.plan(call.graph, split.knobs, count)
        assert plan.kernels[0].spec.name == "attention_decode_direct"
    call.check(*call.run())


@pytest.mark.L0
@pytest.mark.parametrize("is_promised", [False, True])
def test_what_is_behind_a_cluster_s_kernel_has_its_workspace(
    is_promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a pointer that happens to be odd the runs are combined, through the workspace.
    version = "tilewright.engines.triton.attention_decode_config.installed_version"
    monkeypatch.setattr(version, lambda name: "3.6.0")
    graph = tw.Graph(io_data_type="bfloat16", handle=tw.create_handle("cpu"))
    q = graph.tensor((8, 32, 1, 128))
    k, v = (graph.tensor((8, 8, 4096, 128)) for _ in range(2))
    o, _ = graph.sdpa(q, k, v, attn_scale=0.1, is_inference=True)
    o.set_output(True)
    for tensor in (q, k, v, o):
        tensor.alignment_value = 16 if is_promised else 2
    graph.validate()
    made = attention.plan(graph, (), 132)
    assert [kernel.spec.name for kernel in made.kernels] == ["attention_decode_joined"]
    assert made.fallback is not None and len(made.fallback.kernels) == 2
    assert made.fallback.kernels[0].spec.warps == 1
    reached = without_unreached(made, graph)
    if is_promised:
        assert reached.fallback is None and not reached.scratch
    else:
        assert reached.scratch == made.fallback.scratch != ()


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that one of them takes several runs, where one warp is a program."""
    monkeypatch.setattr(attention_decode_config, "pays_in_registers", lambda *_: True)
    monkeypatch.setattr(attention_decode_config, "direct_programs", lambda *_: 8)
    monkeypatch.setattr(attention_decode_config, "_direct_splits", lambda *_: 12)


@pytest.mark.L1
@pytest.mark.parametrize("page", [0, 24, 128])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_program_takes_runs_that_follow_one_another(
    lengths: list[int], page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_programs(monkeypatch)
    call = Decode(2, lengths, page=page, depth=128, depth_v=64)
    call.check(*call.run())


@pytest.mark.L1
def test_how_many_runs_a_program_takes_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    few_programs(monkeypatch)
    alone, among = ([300, 0, 0, 17], [300, 1, KEYS, KEYS])
    first, second = (Decode(1, lengths, depth=64, depth_v=64).run() for lengths in (alone, among))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))


@pytest.mark.L0
@pytest.mark.parametrize("page", [0, PAGE])
def test_a_causal_mask_from_the_bottom_right(page: int) -> None:
    call = Decode(5, LENGTHS[0], page=page, use_causal_mask_bottom_right=True)
    call.check(*call.run())


@pytest.mark.L0
def test_no_sequence_has_any_key() -> None:
    o, stats = Decode(2, [0, 0, 0]).run()
    assert not o.any() and (stats == -torch.inf).all()


@pytest.mark.L0
@pytest.mark.parametrize("page", [0, PAGE])
def test_nothing_in_the_workspace_shows(page: int) -> None:
    # Twice from other bytes, NaN among them, and the same bits.
    call = Decode(2, LENGTHS[2], page=page)
    first, second = call.run(0xFF), call.run(0x00)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
