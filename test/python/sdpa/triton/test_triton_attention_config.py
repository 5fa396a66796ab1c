"""Which tile a declaration gets, and how keys are split: plain arithmetic, for devices by name."""

from __future__ import annotations

from typing import Any

import pytest

import tilewright as tw
from tilewright.engines.triton.attention_arguments import KernelArguments
from tilewright.engines.triton.attention_backward_config import general_config
from tilewright.engines.triton.attention_config import (
    blocks,
    choose_config,
    cut,
    heads_at_a_time,
    pieces,
    takes_many_tiles,
    whole,
)
from tilewright.engines.triton.attention_cost import cost_us, facts_of, ranked_configs
from tilewright.engines.triton.attention_decode_config import (
    MAX_RUNS_A_MULTIPROCESSOR,
    PROGRAMS_A_MULTIPROCESSOR,
    choose_decode_config,
    query_tiles,
)
from tilewright.engines.triton.attention_spec import AttentionSpec, read_spec
from tilewright.graph.enums import knob_type
from tilewright.launch.tensor_maps import TensorMap

pytestmark = pytest.mark.L0

# Multiprocessors, and KiB of shared memory a program may have.
DEVICES = {"a100": (108, 163), "h200": (132, 227), "b200": (148, 227), "rtx pro 6000": (188, 99)}


def spec_of(
    rows: int = 2048,
    keys: int = 2048,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (16, 16),
    depth: int = 128,
    depth_v: int | None = None,
    dtype: str = "bfloat16",
    **arguments: Any,
) -> AttentionSpec:
    graph = tw.Graph(io_data_type=dtype, intermediate_data_type="float32")
    q = graph.tensor((batch, heads[0], rows, depth))
    k, v = (graph.tensor((batch, heads[1], keys, size)) for size in (depth, depth_v or depth))
    if "bias" in arguments:
        arguments["bias"] = graph.tensor(arguments["bias"])
    if "dropout" in arguments:
        drawn = (graph.tensor_scalar(1), graph.tensor_scalar(2))
        arguments["dropout"] = (arguments["dropout"], *drawn)
    o, _ = graph.sdpa(q, k, v, is_inference=True, **arguments)
    o.set_output(True)
    graph.validate()
    return read_spec(graph.operations[0])


@pytest.mark.parametrize(
    ("size", "cut"),
    [
        *((1, (16, 0)), (16, (16, 0)), (17, (32, 0)), (48, (32, 16)), (64, (64, 0))),
        *((72, (64, 16)), (96, (64, 32)), (100, (128, 0)), (128, (128, 0))),
        *((192, (128, 64)), (200, (256, 0))),
    ],
)
def test_a_head_size_is_one_or_two_powers_of_two(size: int, cut: tuple[int, int]) -> None:
    assert pieces(size) == cut and sum(cut) >= size


@pytest.mark.parametrize(
    ("sizes", "dtype", "expected"),
    [
        *(((n, n), "bfloat16", (n, n)) for n in (16, 32, 64, 256)),
        *(((64, 256), "float16", (64, 256)), ((192, 128), "bfloat16", (256, 128))),
        *(((16, 32), "bfloat16", (32, 32)), ((24, 240), "float16", (64, 256))),
        *(((128, 8), "bfloat16", (128, 64)), ((13, 5), "float16", (16, 16))),
        *(((16, 64), "float32", (16, 64)), ((128, 32), "float32", (128, 32))),
    ],
)
def test_no_block_of_16_bits_has_lines_of_its_own(
    sizes: tuple[int, int], dtype: str, expected: tuple[int, int]
) -> None:
    spec = spec_of(depth=sizes[0], depth_v=sizes[1], dtype=dtype)
    assert blocks(spec) == expected
    on_sm90, on_sm80 = (cut(spec, choose_config(spec, count)) for count in (132, 108))
    assert on_sm90 == tuple((block, 0) for block in expected)
    assert on_sm80 == tuple(pieces(size) for size in sizes)


def test_wide_sums_beside_a_bias_or_draws_have_twice_the_warps_on_sm90() -> None:
    for depth, depth_v, warps in ((256, 256, 8), (128, 192, 8), (192, 128, 4), (128, 128, 4)):
        hiding = {"dropout": 0.1, "use_causal_mask": True}
        for arguments in ({"bias": (1, 1, 2048, 2048)}, hiding, {"dropout": 0.1}):
            spec = spec_of(depth=depth, depth_v=depth_v, **arguments)
            # Draws alone leave registers.
            expected = 4 if arguments == {"dropout": 0.1} else warps
            assert choose_config(spec, 132).warps == expected
            assert choose_config(spec, 108).warps == 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tile_fits_into_shared_memory(device: str, depth: int, dtype: str) -> None:
    count, kib = DEVICES[device]
    for rows, heads in ((1, (16, 16)), (16, (16, 4)), (64, (16, 16)), (4096, (16, 16))):
        spec = spec_of(rows, heads=heads, depth=depth, dtype=dtype)
        item_bytes = spec.data_type.bits // 8
        width = sum(pieces(depth)) * item_bytes
        for config in (choose_config(spec, count), choose_decode_config(spec, count)):
            if config is not None:
                keys = config.block_n * width * 2
                # The queries, and keys and values of every stage but the one in use.
                used = config.block_m * width + keys * max(config.stages - 1, 1)
                if config.sharing is not None:
                    # Weights change their layout on their way into the second product.
                    used += config.block_m * config.block_n * item_bytes + 256
                assert used <= kib * 1024, config


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_queries_with_a_bias_fit_into_shared_memory(
    device: str, depth: int, dtype: str
) -> None:
    count, kib = DEVICES[device]
    spec = spec_of(16, heads=(16, 4), depth=depth, dtype=dtype, bias=(1, 1, 16, 2048))
    config = choose_decode_config(spec, count)
    if config is None:
        # Another kernel's.
        assert (device, depth, dtype) == ("rtx pro 6000", 256, "float32")
        return
    item_bytes = spec.data_type.bits // 8
    tile = config.block_m * config.block_n * item_bytes
    # Keys, values and the bias are loaded ahead; what a compiler took for 64 rows of a head of 32
    # in float32 and 4 stages was 237,824 bytes, of 232,448.
    ahead = 2 * config.block_n * depth * item_bytes + tile
    used = config.block_m * depth * item_bytes + (config.stages - 1) * ahead + tile + 256
    assert used <= kib * 1024, config


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tile_of_the_backward_fits_into_shared_memory(
    device: str, depth: int, dtype: str
) -> None:
    count, kib = DEVICES[device]
    spec = spec_of(depth=depth, dtype=dtype)
    config = general_config(spec, count)
    width = depth * spec.data_type.bits // 8
    # Keys and values, rows of Q and dO in every stage, and some of them laid out another way.
    stages = max(config.keys_stages, 1)
    used = (2 * config.keys_keys + (2 * stages + 1) * config.keys_rows) * width
    if depth <= 128:
        # The tile of dBias: queries, keys, values and dO.
        used = max(used, 4 * config.bias_tile * width)
    assert used <= kib * 1024, config


def test_only_the_parts_of_sm90_get_tensor_maps() -> None:
    spec = spec_of()
    found = {name: choose_config(spec, count).has_maps for name, (count, _) in DEVICES.items()}
    assert found == {"a100": False, "h200": True, "b200": False, "rtx pro 6000": False}


@pytest.mark.parametrize(("depth", "swizzle"), [(8, 32), (16, 32), (32, 64), (40, 128), (256, 128)])
def test_a_map_swizzles_as_many_bytes_as_the_kernel_does(depth: int, swizzle: int) -> None:
    # As the compiler lays out shared memory: a row's bytes, 128 at most.
    spec = spec_of(depth=depth)
    arguments = KernelArguments({spec.ports["k"].uid: 1})
    box = (1, 1, 64, whole(depth))
    arguments.tensor_map("k_map", spec.ports["k"], box)
    made = arguments.values["k_map"]
    assert isinstance(made, TensorMap)
    assert made.swizzle_bytes == swizzle and made.box[-1] * 2 == swizzle


def decode_splits(sm_count: int, **facts: Any) -> int:
    config = choose_decode_config(spec_of(**{"rows": 1, "heads": (32, 8), **facts}), sm_count)
    assert config is not None
    return config.splits


def test_keys_are_split_until_the_device_is_full() -> None:
    for batch, keys in ((1, 4096), (4, 4096), (8, 4096), (8, 32768), (1, 131072)):
        splits = decode_splits(132, batch=batch, keys=keys)
        units = batch * 8
        # No more than fill it while runs are short, never more than their sums would cost.
        assert units * splits <= MAX_RUNS_A_MULTIPROCESSOR * 132
        assert units * splits >= 0.75 * PROGRAMS_A_MULTIPROCESSOR * 132 or keys // splits <= 256
        assert keys // splits <= 2048


@pytest.mark.parametrize(
    ("batch", "keys", "splits"),
    # Runs of all key heads: one round of 396 programs, nearly, or three, or many.
    [(8, 16384, 12), (8, 32768, 18), (4, 32768, 37), (25, 4096, 5)],
)
def test_runs_are_shared_out_evenly(batch: int, keys: int, splits: int) -> None:
    spec = spec_of(1, keys, batch=batch, heads=(32, 8))
    config = choose_decode_config(spec, 132)
    assert config is not None and config.sharing is not None
    assert (config.splits, config.sharing.programs) == (splits, 396)
    blocks, units = -(-keys // config.block_n), batch * 8

    def turns(count: int) -> int:
        return -(-units * count // 396) * (-(-blocks // count) + 1)

    others = range(-(-keys // 2048), 16 * 132 // units + 1)
    assert turns(splits) == min(turns(count) for count in others)
    assert turns(splits) < 1.4 * units * blocks / 396


@pytest.mark.parametrize("depth", [64, 128, 256])
def test_programs_that_share_a_multiprocessor_fit(depth: int) -> None:
    for rows in (1, 8):
        spec = spec_of(rows, 32768, batch=8, heads=(32, 8), depth=depth)
        config = choose_decode_config(spec, 132)
        assert config is not None and config.sharing is not None
        count = config.sharing.programs // 132
        # Keys and values of all stages but one, and what products and sums exchange.
        used = 2 * config.block_n * depth * 2 * (config.stages - 1) + 9 * 1024
        assert count * used <= 227 * 1024
        if config.sharing.max_registers is not None:
            assert count * config.warps * 32 * config.sharing.max_registers <= 65536


def test_three_programs_of_small_heads_share_a_multiprocessor() -> None:
    config = choose_config(spec_of(depth=64), 132)
    assert config.is_in_order and config.max_registers is not None
    assert 3 * config.warps * 32 * config.max_registers <= 65536
    # Queries, and stages of keys and values, of two bytes; a KiB a program is the driver's.
    used = (config.block_m + 2 * config.stages * config.block_n) * 64 * 2 + 2 * 1024
    assert 3 * used <= 228 * 1024
    # Another tile is not held to it.
    for knobs in ({knob_type.TILE_M: 64}, {knob_type.WARPS: 8}):
        assert config.with_knobs(knobs).max_registers is None


def test_a_program_of_warp_groups_takes_many_tiles_where_the_next_one_has_room() -> None:
    for depth, is_room in ((128, True), (256, False)):
        spec = spec_of(depth=depth)
        config = choose_config(spec, 132, deals_warps=True)
        assert config.is_specialized
        assert takes_many_tiles(spec, config) is is_room
        assert not takes_many_tiles(spec, choose_config(spec, 132))


def test_heads_side_by_side_share_the_second_level_cache() -> None:
    causal = {"use_causal_mask": True}
    counts = [
        heads_at_a_time(spec_of(16384, 16384, heads=(64, 64), **masks))
        for masks in ({}, causal, {**causal, "sliding_window_length": 1024})
    ]
    # 8 MiB a head of whole keys and values, and 1 MiB of a window's.
    assert counts == [1, 3, 24]
    assert heads_at_a_time(spec_of(16384, 16384, heads=(64, 8), **causal)) == 24
    assert heads_at_a_time(spec_of(2048, 2048, heads=(4, 4), batch=1, **causal)) == 4


def test_only_parts_that_can_start_a_kernel_early_do() -> None:
    found = {}
    for name, (count, _) in DEVICES.items():
        config = choose_decode_config(spec_of(1, 65536, heads=(32, 8)), count)
        assert config is not None and config.sharing is not None
        found[name] = config.sharing.is_early, config.sharing.has_maps
    assert found["a100"] == found["rtx pro 6000"] == (False, False)
    assert found["h200"] == (True, True) and found["b200"] == (True, False)


def test_many_sequences_or_few_keys_are_not_split() -> None:
    assert decode_splits(132, batch=64, keys=4096) == 1
    assert decode_splits(132, batch=128, keys=512) == 1
    assert decode_splits(132, batch=1, keys=128) == 1


@pytest.fixture
def of_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of Triton that has what the kernel for short caches is written in."""
    module = "tilewright.engines.triton.attention_decode_config"
    monkeypatch.setattr(f"{module}.installed_version", lambda name: "3.7.1")


@pytest.mark.usefixtures("of_registers")
@pytest.mark.parametrize(
    ("batch", "keys", "rows", "splits", "warps"),
    [
        *((8, 4096, 1, 16, 2), (8, 2048, 1, 16, 2), (16, 2048, 2, 8, 2)),
        *((32, 1024, 1, 4, 1), (8, 4096, 4, 16, 1), (7, 4096, 2, 16, 2)),
    ],
)
def test_caches_go_into_registers(
    batch: int, keys: int, rows: int, splits: int, warps: int
) -> None:
    config = choose_decode_config(spec_of(rows, keys, batch=batch, heads=(32, 8)), 132)
    assert config is not None and config.is_direct and config.is_joined
    assert (config.splits, config.warps) == (splits, warps)
    # All warps are there at once: two in each quarter of a multiprocessor.
    assert config.max_registers is not None and config.max_registers <= 255
    assert batch * 8 * splits <= 132 * 8
    # A cluster is of 4 to 16 programs.
    assert 4 <= splits // warps <= 16


@pytest.mark.usefixtures("of_registers")
def test_knobs_that_no_cluster_has_are_joined_by_a_kernel() -> None:
    config = choose_decode_config(spec_of(1, 4096, batch=8, heads=(32, 8)), 132)
    assert config is not None and config.is_joined
    assert config.with_knobs(dict(config.knobs())) == config
    other = config.with_knobs({knob_type.SPLIT_K: 24, knob_type.WARPS: 1})
    assert other.is_direct and not other.is_joined
    assert not config.with_knobs({knob_type.SPLIT_K: 24}).is_direct
    # 13 runs a key head have room: of 8 there would be too few, so they are combined.
    config = choose_decode_config(spec_of(1, 4096, batch=10, heads=(32, 8)), 132)
    assert config is not None and config.is_direct and not config.is_joined
    assert config.splits == 13 and config.sharing is not None and config.sharing.max_registers


@pytest.mark.usefixtures("of_registers")
def test_paged_caches_whose_runs_are_no_cluster_s_have_twice_the_runs() -> None:
    def splits(keys: int, page: int, batch: int = 10) -> int:
        graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
        q = graph.tensor((batch, 32, 1, 128))
        k, v = (graph.tensor((batch * keys // page, 8, page, 128)) for _ in range(2))
        kinds = {"data_type": "int32"}
        lengths = [graph.tensor((batch, 1, 1, 1), **kinds) for _ in range(2)]
        tables = [graph.tensor((batch, 1, keys // page, 1), **kinds) for _ in range(2)]
        o, _ = graph.sdpa(
            q,
            k,
            v,
            is_inference=True,
            use_padding_mask=True,
            seq_len_q=lengths[0],
            seq_len_kv=lengths[1],
            paged_attention_k_table=tables[0],
            paged_attention_v_table=tables[1],
            paged_attention_max_seq_len_kv=keys,
        )
        o.set_output(True)
        graph.validate()
        config = choose_decode_config(read_spec(graph.operations[0]), 132)
        assert config is not None and config.is_direct
        return config.splits

    assert splits(4096, 16) == splits(4096, 128) == 26
    # Not where they would be shorter than 128 keys, or more than the combination is for.
    assert splits(2048, 16) == 13 and splits(8192, 16, batch=4) == 32
    assert splits(4096, 16, batch=8) == 16


@pytest.mark.usefixtures("of_registers")
def test_what_registers_do_not_take_goes_another_way() -> None:
    taken = {"rows": 1, "keys": 4096, "batch": 8, "heads": (32, 8)}
    others: list[dict[str, Any]] = [
        *({"batch": 32}, {"batch": 1}, {"keys": 32768}, {"keys": 512}, {"batch": 1, "keys": 32768}),
        *({"rows": 5}, {"heads": (64, 1)}, {"depth": 96}, {"depth": 256}, {"dtype": "float32"}),
        *({"use_alibi_mask": True}, {"sliding_window_length": 100, "use_causal_mask": True}),
    ]
    for other in others:
        config = choose_decode_config(spec_of(**(taken | other)), 132)
        assert config is None or not config.is_direct, other
    for name, (count, _) in DEVICES.items():
        config = choose_decode_config(spec_of(**taken), count)
        assert config is not None and config.is_direct == (name == "h200")


def test_other_declarations_are_not_for_the_kernel_of_few_queries() -> None:
    for spec in (spec_of(17), with_dropout()):
        assert choose_decode_config(spec, 132) is None


@pytest.mark.parametrize("sizes", [(96, 96), (40, 72), (16, 64)])
def test_a_warp_group_s_tile_of_few_queries_is_one_piece_on_sm90(sizes: tuple[int, int]) -> None:
    # As tiles of many queries: with narrower ones beside wider ones the assembler goes wrong.
    spec = spec_of(16, 4096, heads=(16, 4), depth=sizes[0], depth_v=sizes[1])
    for count, is_whole in ((132, True), (108, False)):
        config = choose_decode_config(spec, count)
        assert config is not None and config.block_m == 64
        block, block_v = cut(spec, config)
        assert (block, block_v) == (
            tuple((size, 0) for size in blocks(spec)) if is_whole else tuple(map(pieces, sizes))
        )
    small = spec_of(1, 4096, heads=(16, 4), depth=sizes[0], depth_v=sizes[1])
    config = choose_decode_config(small, 132)
    assert config is not None and cut(small, config) == tuple(map(pieces, sizes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "heads", "tiles"),
    [(16, (32, 4), 2), (4, (32, 1), 2), (1, (128, 1), 2), (9, (32, 4), 2)],
)
def test_more_queries_than_a_tile_has_are_several_tiles(
    device: str, rows: int, heads: tuple[int, int], tiles: int
) -> None:
    count, _ = DEVICES[device]
    spec = spec_of(rows, 32768, batch=1, heads=heads)
    config = choose_decode_config(spec, count)
    assert config is not None and config.block_m == 64 and query_tiles(spec, 64) == tiles
    # Its keys are split, and it is ranked in front of the kernel that reads them for each head.
    assert tiles * heads[1] * config.splits >= 0.75 * PROGRAMS_A_MULTIPROCESSOR * count
    assert ranked_configs(spec, count)[0] == config
    facts = facts_of(count)
    assert cost_us(spec, config, facts) < cost_us(spec, choose_config(spec, count), facts)


def with_dropout() -> AttentionSpec:
    graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
    q, k, v = (graph.tensor((2, 4, 1, 64)) for _ in range(3))
    dropout = (0.1, graph.tensor_scalar(1), graph.tensor_scalar(2))
    o, _ = graph.sdpa(q, k, v, is_inference=True, dropout=dropout)
    o.set_output(True)
    graph.validate()
    return read_spec(graph.operations[0])


def test_every_ranked_config_is_another_tile_that_fits() -> None:
    for rows, heads in ((1, (32, 8)), (1, (8, 8)), (2048, (16, 16)), (40, (4, 4))):
        spec = spec_of(rows, heads=heads, batch=1)
        ranked = ranked_configs(spec, 132)
        assert len({config.knobs() for config in ranked}) == len(ranked)
        assert ranked[0] == (choose_decode_config(spec, 132) or choose_config(spec, 132))
        # A plan is built from its knobs alone.
        for config in ranked:
            chosen = choose_decode_config(spec, 132) if config.splits else None
            again = (chosen or choose_config(spec, 132)).with_knobs(dict(config.knobs()))
            assert again == config


def test_knobs_say_the_whole_tile() -> None:
    for rows in (1, 2048):
        spec = spec_of(rows, heads=(32, 8), batch=1)
        config = choose_decode_config(spec, 132) or choose_config(spec, 132)
        again = config.with_knobs(dict(config.knobs()))
        assert again == config
