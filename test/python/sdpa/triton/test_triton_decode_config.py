"""Tiles of decoding calls, and which share clusters of warps between two sequences."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright as tw
from tilewright.engines.triton.attention_config import JOINED_REGISTERS, PAIRED_REGISTERS
from tilewright.engines.triton.attention_cost import ranked_configs
from tilewright.engines.triton.attention_decode_config import choose_decode_config
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
from tilewright.graph.enums import knob_type

pytestmark = pytest.mark.L0


@pytest.fixture(autouse=True)
def of_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of Triton that has what the kernels for short caches are written in."""
    module = "tilewright.engines.triton.attention_decode_config"
    monkeypatch.setattr(f"{module}.installed_version", lambda name: "3.7.1")


def spec_of(
    rows: int, keys: int, batch: int, *, depth: int = 128, has_lengths: bool = True, **masks: bool
) -> AttentionSpec:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q = graph.tensor((batch, 32, rows, depth))
    k, v = (graph.tensor((batch, 8, keys, depth)) for _ in range(2))
    lengths = [graph.tensor((batch, 1, 1, 1), data_type="int32") for _ in range(2)]
    options = {"seq_len_q": lengths[0], "seq_len_kv": lengths[1], "use_padding_mask": True}
    given: dict[str, Any] = {**masks, **(options if has_lengths else {})}
    o, _ = graph.sdpa(q, k, v, is_inference=True, **given)
    o.set_output(True)
    graph.validate()
    return read_spec(graph.operations[0])


@pytest.mark.parametrize(
    ("batch", "keys", "rows", "splits", "warps"),
    [(16, 2048, 1, 16, 2), (15, 2048, 2, 16, 2), (16, 1024, 1, 16, 2), (32, 1024, 1, 8, 1)],
)
def test_two_sequences_of_lengths_share_a_cluster(
    batch: int, keys: int, rows: int, splits: int, warps: int
) -> None:
    spec = spec_of(rows, keys, batch)
    config = choose_decode_config(spec, 132)
    assert config is not None and config.is_paired and config.is_joined
    assert (config.splits, config.warps) == (splits, warps)
    # Its warps are as many as where each sequence has a cluster for itself.
    assert -(-batch // 2) * 8 * splits <= 132 * 8 and 8 <= splits // warps <= 16
    assert config.with_knobs(dict(config.knobs())) == config
    alone = config.with_knobs({knob_type.SPLIT_K: splits // 2})
    assert alone.is_joined and not alone.is_paired
    assert (config.max_registers, alone.max_registers) == (PAIRED_REGISTERS, JOINED_REGISTERS)
    assert not config.with_knobs({knob_type.SPLIT_K: 2 * splits}).is_joined
    knobs = [config.knobs() for config in ranked_configs(spec, 132)]
    assert len(set(knobs)) == len(knobs) and alone.knobs() in knobs


def test_a_sequence_has_a_cluster_for_itself_where_two_would_not_do() -> None:
    # Without lengths all are as long; 16 queries a warp leave no registers for 16 more; and of
    # clusters of 32 warps there are not as many.
    alone = [
        spec_of(1, 2048, 16, has_lengths=False),
        spec_of(4, 2048, 16),
        spec_of(1, 4096, 8),
    ]
    for spec in alone:
        config = choose_decode_config(spec, 132)
        assert config is not None and config.is_joined and not config.is_paired


def test_the_newest_token_alone_sees_all_keys() -> None:
    plain = choose_decode_config(spec_of(1, 4096, 8), 132)
    assert plain is not None and plain.is_joined
    for has_lengths in (True, False):
        spec = spec_of(1, 4096, 8, has_lengths=has_lengths, use_causal_mask_bottom_right=True)
        assert not spec.is_banded and choose_decode_config(spec, 132) == plain
    # Of two the first does not see the last key; from the top left, one sees the first key alone.
    assert spec_of(2, 4096, 8, use_causal_mask_bottom_right=True).right == 0
    assert spec_of(1, 4096, 8, use_causal_mask=True).right == 0


@pytest.mark.parametrize(
    ("depth", "rows", "plain", "hiding"),
    [
        (64, 4, (16, 128, 4), (16, 64, 4)),
        (128, 4, (16, 64, 4), (16, 32, 4)),
        (128, 16, (64, 64, 4), (64, 32, 4)),
        (256, 4, (16, 32, 4), (16, 32, 4)),
        (256, 16, (64, 32, 4), (64, 32, 8)),
    ],
)
def test_where_values_may_be_hidden_a_thread_has_less(
    depth: int, rows: int, plain: tuple[int, int, int], hiding: tuple[int, int, int]
) -> None:
    """(queries, keys, warps) of a tile."""

    def tile(sm_count: int, **masks: bool) -> tuple[int, int, int]:
        spec = spec_of(rows, 65536, 8, depth=depth, **masks)
        config = choose_decode_config(spec, sm_count)
        assert config is not None and not config.is_direct
        return config.block_m, config.block_n, config.warps

    assert (tile(132), tile(132, use_causal_mask_bottom_right=True)) == (plain, hiding)
    # Elsewhere nothing was measured.
    assert tile(108) == tile(108, use_causal_mask_bottom_right=True)
