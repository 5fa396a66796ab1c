"""Where the assembler puts the waits for products in attention forward's loops: no GPU needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.L1

# In a process of its own: kernels are compiled, whatever the tests' environment says.
DISASSEMBLE = """
import json, pathlib, subprocess, sys, tempfile
import triton
import tilewright as tw
from tilewright.engines.compiled import compiler
from tilewright.engines.hopper import attention

def declared(is_packed):
    graph = tw.Graph(
        io_data_type="bfloat16", intermediate_data_type="float32", handle=tw.create_handle("cpu")
    )
    batch, heads, rows, size = 60, 16, 4096, 128
    dim, options, offsets = (batch, heads, rows, size), {}, {}
    stride = (heads * rows * size, rows * size, size, 1)
    if is_packed:
        sums = graph.tensor((batch + 1, 1, 1, 1), data_type="int32")
        unit = heads * size
        stride = (rows * unit, size, unit, 1)
        offsets = {"ragged_offset": sums, "ragged_offset_multiplier": unit}
        options = {"use_padding_mask": True, "cu_seq_len_q": sums, "cu_seq_len_kv": sums}
    q, k, v = (graph.tensor(dim, stride, **offsets) for _ in range(3))
    out, _ = graph.sdpa(q, k, v, is_inference=True, use_causal_mask=True, **options)
    out.set_output(True).set_dim(dim).set_stride(stride)
    if is_packed:
        out.set_ragged_offset(sums).set_ragged_offset_multiplier(unit)
    graph.validate()
    return graph

tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
texts = []
for is_packed in (False, True):
    kernel = attention.plan(declared(is_packed), (), 132).kernels[-1]
    code = compiler.compile_kernel(kernel.spec, (9, 0))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.image)
        file.flush()
        run = subprocess.run(
            [tool, "-sass", file.name], capture_output=True, text=True, check=True
        )
    texts.append(run.stdout)
print(json.dumps(texts))
"""
INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
BACK = re.compile(r"\bBRA.*?0x([0-9a-f]+)")


def loops(text: str) -> list[list[str]]:
    """The bodies of innermost loops that make both products of a block, 8 instructions each.

    A longer one is that of tiles, or a jump back from a wait's slow path at the code's end.
    """
    lines = [(int(m[1], 16), m[2]) for m in map(INSTRUCTION.match, text.splitlines()) if m]
    index = {address: at for at, (address, _) in enumerate(lines)}
    found = []
    for at, (address, instruction) in enumerate(lines):
        target = BACK.search(instruction)
        if target is None or not int(target[1], 16) < address:
            continue
        body = [line for _, line in lines[index[int(target[1], 16)] : at + 1]]
        if len(body) < 700 and sum("HGMMA" in line for line in body) == 16:
            found.append(body)
    return found


def test_exponentials_run_under_the_product_with_values() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-c", DISASSEMBLE], capture_output=True, text=True, env=environment
    )
    assert child.returncode == 0, child.stderr
    for name, text in zip(("dense", "packed"), json.loads(child.stdout), strict=True):
        bodies = loops(text)
        assert len(bodies) >= 2, name  # one a consumer
        for body in bodies:
            waits = [at for at, line in enumerate(body) if "DEPBAR.LE gsb0" in line]
            assert len(waits) == 2, (name, waits)
            made = [at for at, line in enumerate(body) if "MUFU.EX2" in line]
            before = sum(at < waits[1] for at in made)
            assert len(made) >= 64 and before >= len(made) // 2, (name, before, len(made))
            # A block's maxima are looked for behind a branch, when its exponentials are made.
            maxima = [at for at, line in enumerate(body) if "FMNMX" in line]
            assert made[63] < maxima[0], name
