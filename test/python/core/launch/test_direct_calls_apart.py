"""Plain calls share nothing: blocks, threads, devices and streams, and calls inside calls."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch
from launch_samples.norm import (
    ROWS,
    WIDTH,
    aligned,
    norm_graph,
    operands,
    slots,
)

import tilewright as tw
from tilewright.engines.compiled.planned import KernelPlan
from tilewright.launch.prepared import Constant, Operand, Scratch

pytestmark = pytest.mark.L0


def test_frames_of_the_short_way_share_no_block(fake_driver: Any, norm: Any) -> None:
    # L10: each frame keeps its own operands, whatever is bound or executed meanwhile.
    built = norm()
    packs = [operands() for _ in range(3)]
    frames = [built.bind(pack) for pack in packs]
    assert all(built._direct.bind(pack, None) is not None for pack in packs)
    built.execute(operands())
    fake_driver.take()
    for _ in range(2):
        for pack, frame in zip(packs, frames, strict=True):
            frame.launch()
            (launched,) = fake_driver.take()
            assert launched.parameters[:8] == struct.pack("<Q", pack["x"].data_ptr())
    assert {frame.plan_name for frame in frames} == {"triton"}


def two_kernels(make_kernel: Any, at: dict[str, int]) -> KernelPlan:
    first = make_kernel(1, [("*fp32", Operand(at["x"])), ("*fp32", Scratch(0))])
    second = make_kernel(
        2, [("*fp32", Scratch(256)), ("*fp32", Operand(at["y"])), ("i32", Constant(3))], (1, 2, 3)
    )
    return KernelPlan((first, second), (("one", 16), ("two", 32)))


def test_several_kernels_and_their_workspace(
    fake_driver: Any, build: Any, make_kernel: Any
) -> None:
    graph = norm_graph()
    built = build(graph, two_kernels(make_kernel, slots(graph)))
    assert built.workspace_bytes == 288
    pack = operands()
    space = aligned(torch.zeros(128)).view(torch.uint8)
    start = space.data_ptr()
    built.execute(pack, space)
    first, second = fake_driver.take()
    assert built._direct.current(pack, space, None)
    assert (first.function, second.function, second.grid) == (0x1000, 0x2000, (1, 2, 3))
    assert first.parameters[8:16] == struct.pack("<Q", start)
    wanted = struct.pack("<QQi4x", start + 256, pack["y"].data_ptr(), 3)
    assert second.parameters[:24] == wanted
    # Another workspace alone is another call; the blocks are those of the first one.
    other = aligned(torch.zeros(128)).view(torch.uint8)
    fake_driver.take()
    built.execute(pack, other)
    assert fake_driver.take()[0].parameters[8:16] == struct.pack("<Q", other.data_ptr())
    assert len(built.executable._blocks._entries) == 1
    # L6, B6: refused before any launch; and so is one that is short, or not aligned for kernels.
    fake_driver.take()
    storage = aligned(torch.zeros(256))
    shrunk = torch.zeros(288, dtype=torch.uint8)
    shrunk.untyped_storage().resize_(64)
    cases = {
        "none given": None,
        " 64 bytes": shrunk,
        "287 bytes": space[:287],
        "285 bytes": space[::2][:143],
        " 1 bytes": space[:1].expand(288),
        "overlap": storage.view(torch.uint8),
        "multiple of 16": aligned(torch.zeros(128)).view(torch.uint8)[8:],
    }
    for message, wrong in cases.items():
        with pytest.raises(tw.BindingError, match=message):
            built.execute({**pack, "x": storage[:64].view(ROWS, WIDTH)}, wrong)
        assert fake_driver.take() == []
    built.execute({**pack, "x": storage[:64].view(ROWS, WIDTH)}, storage[64:].view(torch.uint8))
    assert len(fake_driver.take()) == 2


def test_a_refusal_by_the_driver_is_told_and_the_next_call_is_right(
    fake_driver: Any, norm: Any
) -> None:
    built = norm()
    pack = operands()
    built.execute(pack)
    (wanted,) = fake_driver.take()
    for run in (lambda: built.execute(pack), lambda: built.bind(pack).launch()):
        fake_driver.statuses = [700]
        with pytest.raises(tw.LaunchError, match=r"'k': launch: CUDA error 700"):
            run()
        run()
        assert fake_driver.take() == [wanted]


def test_a_thread_without_a_context_gets_one(fake_driver: Any, norm: Any) -> None:
    built = norm()
    pack = operands()
    frame = built.bind(pack)
    for run in (lambda: built.execute(pack), frame.launch):
        fake_driver.statuses = [201]
        run()
        assert len(fake_driver.take()) == 1 and fake_driver.contexts_made == [0]
        fake_driver.contexts_made.clear()


def test_calls_inside_a_call_share_no_block(
    fake_driver: Any, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # L10: while one call is at the driver, another thread binds and launches other buffers.
    from tilewright.launch import driver_launch

    packs = [operands(), operands()]
    seen: list[bytes] = []

    def launch(config: Any, function: Any, parameters: None, extra: Any) -> int:
        if not seen:
            seen.append(b"")
            built.execute(packs[1])
        return fake_driver.launch(config, function, parameters, extra)

    monkeypatch.setattr(driver_launch, "launch_function", lambda: launch)
    built = norm()
    built.execute(packs[0])
    inner, outer = fake_driver.take()
    assert inner.parameters[:8] == struct.pack("<Q", packs[1]["x"].data_ptr())
    assert outer.parameters[:8] == struct.pack("<Q", packs[0]["x"].data_ptr())


def test_the_short_way_leaves_another_current_device_to_the_binder(
    fake_driver: Any, norm: Any
) -> None:
    built = norm()
    pack = operands()
    built.execute(pack)
    fake_driver.device = 2
    built.execute(pack)
    assert [each.device for each in fake_driver.take()] == [0, 0] and fake_driver.device == 2


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a CUDA device."""

    index = 1

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    def get_device(self) -> int:
        return self.index


def on_device(tensor: torch.Tensor, index: int) -> torch.Tensor:
    made = tensor.as_subclass(OnDevice)
    made.index = index
    return made


def test_work_goes_to_the_operands_device_and_its_stream(fake_driver: Any, norm: Any) -> None:
    # L8, B13: whatever is current before is so again, after a failure too.
    built = norm("cuda:1")
    pack = {name: on_device(t, 1) for name, t in operands().items()}
    frame = built.bind(pack)
    for current in (0, 1, 2):
        fake_driver.device = current
        for run in (built.execute, lambda pack, space, stream: frame.launch(stream)):
            run(pack, None, None)
            run(pack, None, 55)
            omitted, given = fake_driver.take()
            assert (omitted.stream, omitted.device) == (1001, 1)
            assert (given.stream, given.device) == (55, 1)
            fake_driver.statuses = [1]
            with pytest.raises(tw.LaunchError):
                run(pack, None, None)
            assert fake_driver.device == current and fake_driver.take() == []
    fake_driver.device = 1
    with pytest.raises(tw.BindingError, match="on cpu; expected cuda:1"):
        built.execute(operands())
    with pytest.raises(tw.BindingError, match="on cuda:0; expected cuda:1"):
        built.execute({**pack, "x": on_device(operands()["x"], 0)})
    with pytest.raises(tw.BindingError, match="stream: got 'seven'"):
        frame.launch("seven")
