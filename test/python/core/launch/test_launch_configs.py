"""What a launch tells the driver beyond parameters: geometry, stream, and whether it is early."""

from __future__ import annotations

import ctypes

import pytest

from tilewright.launch.driver_launch import LaunchAttribute, LaunchConfig, StreamConfigs

pytestmark = pytest.mark.L0


def test_the_structures_are_as_large_as_the_driver_s() -> None:
    assert ctypes.sizeof(LaunchAttribute) == 72 and LaunchAttribute.value.offset == 8
    assert ctypes.sizeof(LaunchConfig) == 56


@pytest.mark.parametrize("is_early", [False, True])
def test_a_configuration_names_its_stream_and_says_whether_it_is_early(is_early: bool) -> None:
    configs = StreamConfigs((3, 2, 1), 128, 4096, is_early=is_early)
    made = configs[7]._obj
    assert configs[7]._obj is made, "it is made once a stream"
    assert (list(made.grid), list(made.block)) == ([3, 2, 1], [128, 1, 1])
    assert (made.shared_bytes, made.stream) == (4096, 7)
    assert made.attribute_count == int(is_early)
    if is_early:
        attribute = LaunchAttribute.from_address(made.attributes)
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed.
        assert attribute.id == 6 and attribute.value[0] == 1
    else:
        assert made.attributes is None
