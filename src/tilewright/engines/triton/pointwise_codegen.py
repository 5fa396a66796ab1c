"""A kernel's source text from a problem and the way to walk it, and the function it defines.

The text depends on nothing but the two, and the function's source can be inspected, so the key of
its artifact sees it. Values are kept in float32, float64 or 64-bit integers; what an operation
stores is rounded to its data type, in the graph or outside of it.
"""

from __future__ import annotations

import functools
import hashlib
import linecache

import triton
import triton.language as tl

from tilewright.engines.triton import device_math, pointwise_functions
from tilewright.engines.triton.pointwise_index import (
    JOIN_TASK,
    PARTS_TASK,
    WHOLE_TASK,
    Generated,
    extent_of,
)
from tilewright.engines.triton.pointwise_layout import Problem, Walk, combining
from tilewright.engines.triton.pointwise_nodes import Node, Read, Scalar, operands_of
from tilewright.engines.triton.pointwise_values import ValueWriter

__all__ = ["Generated", "function_of", "generate"]


def generate(problem: Problem, walk: Walk) -> list[Generated]:
    """The sources: one kernel, or one for the parts of a reduction and one that joins them.

    Raises:
        NotSupportedError: for a mode or data type that generated kernels do not have.
    """
    if walk.parts == 1:
        return [_Writer(problem, walk, WHOLE_TASK).write()]
    return [
        _Writer(problem, walk, PARTS_TASK).write(),
        _Writer(problem, combining(walk), JOIN_TASK, walk.parts).write(),
    ]


@functools.lru_cache(maxsize=1024)
def function_of(name: str, text: str) -> object:
    """The jitted function that ``text`` defines as ``name``; one for each text."""
    file = f"<generated {name}>"
    # With no time stamp the lines are never looked for on a disk.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, object] = {
        "__name__": __name__,
        "triton": triton,
        "tl": tl,
        **_names(),
    }
    exec(compile(text, file, "exec"), names)
    return names[name]


@functools.cache
def _names() -> dict[str, object]:
    """What expressions call."""
    found: dict[str, object] = {}
    for module in (device_math, pointwise_functions):
        for name in dir(module):
            member = getattr(module, name)
            if not name.startswith("_") and callable(member) and not isinstance(member, type):
                found[name] = member
    return found


class _Writer(ValueWriter):
    def write(self) -> Generated:
        head = self._index()
        stores: dict[int, list[int]] = {}
        for position, (_, node) in enumerate(self.problem.outputs):
            # Of two kernels the first writes what has elements along the reduced axes.
            if self.task == WHOLE_TASK or (self.task == PARTS_TASK) == self.problem.is_full(node):
                stores.setdefault(id(node), []).append(position)
        needed = self._needed(stores)
        for node in self.problem.nodes:
            if id(node) not in needed:
                continue
            self.values[id(node)] = self._value(node)
            for position in stores.get(id(node), []):
                self._store(position, node)
        lines = head + self.before
        if self.walk.is_looped:
            extent = self._number(extent_of(self.walk.inner))
            span = f"0, {extent}"
            if self.task == PARTS_TASK:
                tiles = -(-extent_of(self.walk.inner) // self.walk.block_inner)
                size = self._number(-(-tiles // self.parts) * self.walk.block_inner)
                span = f"part * {size}, min((part + 1) * {size}, {extent})"
            lines += [f"for start in range({span}, BLOCK_I):"]
            lines += ["    " + line for line in [*self._inner_index("start"), *self.body]]
            lines += self.after
        made = self.made
        names = [name for name, _ in made.tensors.values()]
        names += [name for name, _, _ in made.shares]
        names += [name for name, _ in made.scalars.values()]
        names += [name for name, _, _ in made.integers]
        names += ["BLOCK_R: tl.constexpr", "BLOCK_I: tl.constexpr"]
        body = "".join(f"    {line}\n" for line in lines)
        digest = hashlib.sha256((", ".join(names) + body).encode()).hexdigest()[:16]
        made.name = f"chain_{digest}"
        made.text = f"@triton.jit\ndef {made.name}({', '.join(names)}):\n{body}"
        return made

    def _needed(self, stores: dict[int, list[int]]) -> set[int]:
        """ids of the nodes that this kernel computes."""
        needed = set(stores)
        for node in reversed(self.problem.nodes):
            takes_axes = self.problem.takes_axes(node)
            if self.task == PARTS_TASK and takes_axes:
                needed.add(id(node))
            if id(node) in needed and not (self.task == JOIN_TASK and takes_axes):
                needed.update(id(operand) for operand in operands_of(node))
        return needed

    def _store(self, position: int, node: Node) -> None:
        walk = self.walk
        tensor = self.problem.outputs[position][0]
        place = position + len(self.problem.reads)
        lines = self._section(node)
        value = self.values[id(node)]
        stored = value.stored
        if isinstance(node, Read | Scalar):
            stored = self._settled(lines, value.name, value.kind, tensor.data_type).stored
        address, has_rows, has_inner = self._address(place, 0)
        parts = [self._mask(has_rows, has_inner)]
        # What has no extent along an axis is written by the first program there alone.
        if not has_rows and walk.row_tiles > 1:
            parts.append("(tile_r == 0)")
        if not has_inner and walk.inner_tiles > 1:
            parts.append("(tile_i == 0)")
        parts += [f"(a{at} == 0)" for at, axis in enumerate(walk.outer) if not axis.strides[place]]
        mask = " & ".join(part for part in parts if part)
        address = self._widened(address, has_rows or has_inner)
        self._note_contiguity(tensor, place)
        pointer = self._pointer(tensor)
        lines.append(f"tl.store({pointer} + {address}, {stored}{f', mask={mask}' if mask else ''})")
