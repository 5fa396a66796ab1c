"""What a launch tells the driver beyond parameters: geometry, stream, and whether it is early."""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tilewright.launch import cuda_driver, driver_launch
from tilewright.launch.driver_launch import LaunchAttribute, LaunchConfig, StreamConfigs

pytestmark = pytest.mark.L0


def test_the_structures_are_as_large_as_the_driver_s() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 72 and LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(LaunchConfig) == 56


@pytest.mark.parametrize("cluster", [1, 16])
@pytest.mark.parametrize("is_early", [False, True])
def test_a_configuration_names_its_stream_and_says_what_is_special(
    is_early: bool, cluster: int
) -> None:
    configs = StreamConfigs((32, 2, 1), 128, 4096, is_early=is_early, cluster=cluster)
    made = configs[7]._obj
    assert configs[7]._obj is made, "it is made once a stream"
    assert (list(made.grid), list(made.block)) == ([32, 2, 1], [128, 1, 1])
    assert (made.shared_bytes, made.stream) == (4096, 7)
    told = {}
    for number in range(made.attribute_count):
        at = made.attributes + number * ctypes.sizeof(LaunchAttribute)
        attribute = LaunchAttribute.from_address(at)
        told[attribute.id] = list(attribute.value)[:3]
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed.
    want = {6: [1, 0, 0]} if is_early else {}
    # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, and _SCHEDULING_POLICY_PREFERENCE, load balancing.
    want |= {4: [16, 1, 1], 5: [2, 0, 0]} if cluster > 1 else {}
    assert told == want
    assert want or made.attributes is None


def test_wide_clusters_are_allowed_in_the_devices_context(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module may be loaded already, and the thread may have made no call of the runtime yet.
    asked: list[Any] = []

    @contextlib.contextmanager
    def device_context(device_index: int) -> Iterator[None]:
        asked.append(device_index)
        yield
        asked.append("over")

    def set_attribute(function: Any, attribute: int, value: int) -> int:
        asked.append((function.value, attribute, value))
        return 0

    library = types.SimpleNamespace(cuFuncSetAttribute=set_attribute)
    monkeypatch.setattr(cuda_driver, "driver", lambda: library)
    monkeypatch.setattr(driver_launch, "device_context", device_context)
    cuda_driver.allow_wide_clusters(0x1000, "k", 3)
    assert asked == [3, (0x1000, 14, 1), "over"]
