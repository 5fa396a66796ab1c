"""Memory of long sequences, blocks, and offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from tilewright.engines.aten.attention_blocks import (
    SCORE_BLOCK_ELEMENTS,
    Band,
    blocks,
    choose_tiling,
    chunks,
)

pytestmark = pytest.mark.L0

LIMIT_MB = 100

_CHILD = """
import sys
import torch, tilewright
from tilewright.engines.aten.attention import prepare_sdpa, prepare_sdpa_backward

torch.set_num_threads(1)
device, dim = torch.device("cpu"), (1, 8, 8192, 64)
masks = {"use_causal_mask": True, "sliding_window_length": int(sys.argv[1])}

def declare(kind, names, **options):
    graph = tilewright.Graph(io_data_type=torch.float32)
    stats = (1, 8, 8192, 1)
    tensors = [graph.tensor(dim=stats if name == "stats" else dim) for name in names]
    for output in getattr(graph, kind)(*tensors, attn_scale=0.125, **masks, **options):
        output.set_output(True)
    graph.validate()
    return graph.operations[0]

generator = torch.Generator().manual_seed(0)
q, k, v, d_o = (torch.randn(dim, generator=generator) for _ in range(4))
o, d_q, d_k, d_v = (torch.zeros(dim) for _ in range(4))
stats = torch.zeros(1, 8, 8192, 1)
forward = prepare_sdpa(declare("sdpa", "qkv", generate_stats=True), device)
backward = prepare_sdpa_backward(
    declare("sdpa_backward", ("q", "k", "v", "o", "dO", "stats")), device
)
torch.bmm(q[0, :, :64], k[0, :, :64].transpose(1, 2)).exp_().sum()

def peak_mb():
    # Not ru_maxrss: a child of a large process begins with that one's peak.
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))

peaks = [peak_mb()]
forward({"q": q, "k": k, "v": v}, {"O": o, "Stats": stats})
peaks.append(peak_mb())
saved = {"q": q, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats}
backward(saved, {"dQ": d_q, "dK": d_k, "dV": d_v})
peaks.append(peak_mb())
assert torch.isfinite(d_k).all() and d_k.abs().max() > 0
print(peaks[1] - peaks[0], peaks[2] - peaks[0])
"""


def test_long_sequences_add_little_memory(run_python):
    """(1, 8, 8192, 64) float32: all scores of it would be 2 GiB."""
    forward_mb, backward_mb = map(float, run_python(_CHILD, "512").split())
    assert forward_mb < LIMIT_MB
    assert backward_mb < LIMIT_MB


@pytest.mark.parametrize(
    ("batches", "heads_kv", "group", "rows", "keys"),
    [(2, 3, 4, 100, 70), (1, 2, 8, 1, 300_000), (3, 2, 1, 5000, 4000), (1, 1, 64, 1, 900_000)],
)
@pytest.mark.parametrize("band", [Band(None, None, 0), Band(None, 0, 7), Band(100, 20, -3)])
def test_blocks_cover_every_row_once_within_the_budget(batches, heads_kv, group, rows, keys, band):
    tiling = choose_tiling(batches, heads_kv, group, rows, keys, band)
    seen = torch.zeros(batches, heads_kv * group, rows, dtype=torch.int32)
    for chunk in chunks(batches, heads_kv, tiling):
        for block in blocks(chunk, group, rows, keys, band, tiling):
            seen[slice(*block.batch), slice(*block.head), slice(*block.row)] += 1
            shape = block.shape
            assert shape[0] * shape[1] * shape[2] * shape[3] * shape[4] <= SCORE_BLOCK_ELEMENTS
            assert block.head[0] >= block.head_kv[0] * group
            assert block.head[1] <= block.head_kv[1] * group
    assert (seen == 1).all()


def test_visible_keys_of_a_block_are_those_that_some_row_sees():
    for left in (None, 1, 3):
        for right in (None, 0, 2):
            for shift in (-4, 0, 5):
                band = Band(left, right, shift)
                for first, last in ((0, 1), (2, 5), (8, 9)):
                    seen = [
                        key
                        for key in range(9)
                        for row in range(first, last)
                        if (left is None or key > row + shift - left)
                        and (right is None or key <= row + shift + right)
                    ]
                    low, high = band.visible(first, last, 9)
                    assert list(range(low, high)) == sorted(set(seen))


def sparse(tmp_path, elements: int) -> torch.Tensor:
    """Zeros of bfloat16 in a file without blocks."""
    path = str(tmp_path / "sparse")
    storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=2 * elements)
    return torch.empty(0, dtype=torch.bfloat16).set_(storage)


def test_page_index_beyond_32_bits(bench, tmp_path):
    """Page stride 16384 and page 262144: element 2**32; page 0 is what 32 bits would read."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(shape, generator=generator).to(torch.bfloat16)
        for shape in ((1, 2, 3, 64), (1, 2, 16, 64), (1, 2, 16, 64))
    )
    flat = sparse(tmp_path, 262145 * 16384)
    pages = flat.as_strided((262145, 2, 16, 64), (16384, 1024, 64, 1))
    pages[262144], pages[0] = k[0], k[0].flip(1)
    table = torch.full((1, 1, 1, 1), 262144, dtype=torch.int32)
    lengths = torch.full((1, 1, 1, 1), 3, dtype=torch.int32)
    bench.runner.checks_inputs = False
    found = bench.run(
        "sdpa",
        {
            **{"q": q, "k": pages, "v": v, "seq_len_q": lengths, "seq_len_kv": lengths * 5},
            **{"paged_attention_k_table": table, "paged_attention_v_table": table * 0},
        },
        generate_stats=True,
        use_padding_mask=True,
        paged_attention_max_seq_len_kv=16,
        attn_scale=0.125,
    )
    expected = bench.reference(q, k, v, bench.Rule(scale=0.125, len_kv=[15]))
    bench.close("O", found["O"], expected["O"], 5e-6)


def test_token_stride_beyond_32_bits(bench, tmp_path):
    """dO with a token stride of 2**30: five rows pass 2**32, where the first row lies again."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, d_o = (
        torch.randn(1, 1, 5, 8, generator=generator).to(torch.bfloat16) for _ in range(4)
    )
    wide = sparse(tmp_path, 2**32 + 8).as_strided((1, 1, 5, 8), (8, 8, 2**30, 1))
    wide.copy_(d_o)
    rule = bench.Rule(scale=0.3, right=0)
    forward = bench.reference(q, k, v, rule)
    o, stats = forward["O"].float(), forward["Stats"].float()
    bench.runner.checks_inputs = False
    found = bench.run(
        "sdpa_backward",
        {"q": q, "k": k, "v": v, "o": o, "dO": wide, "stats": stats},
        attn_scale=0.3,
        use_causal_mask=True,
    )
    expected = bench.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        bench.close(port, value, expected[port], 5e-6)
