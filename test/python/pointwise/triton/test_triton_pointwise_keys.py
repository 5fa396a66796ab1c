"""Keys of generated kernels: the graph alone decides them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.L1


KEYS = """
import sys
import tilewright as tw
from tilewright.engines.compiled.code_cache import key_of
from tilewright.engines.triton import pointwise

graph = tw.Graph(io_data_type="bfloat16", intermediate_data_type="float32")
x, b = graph.tensor((64, 20000)), graph.tensor((1, 20000))
y = graph.swish(graph.bias(x, b), swish_beta=float(sys.argv[1])).set_output(True)
graph.reduction(y, tw.reduction_mode.NORM2).set_dim((64, 1)).set_output(True)
graph.transpose(y, (1, 0)).set_output(True)
graph.validate()
for kernel in pointwise.plan(graph, (), 132).kernels:
    print(key_of(kernel.spec, (9, 0)).digest())
"""


def test_keys_are_those_of_the_graph_in_every_process() -> None:
    # A2: the same text in each process, whatever its hash seed; a parameter is part of it.
    def keys(seed: int, beta: float) -> list[str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONHASHSEED"] = str(seed)
        command = [sys.executable, "-c", KEYS, str(beta)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = keys(1, 1.0)
    assert len(first) == len(set(first)) == 3
    assert keys(2, 1.0) == first
    assert not set(keys(1, 2.0)) & set(first[:1])
