"""A sink among a row's scores: it has a weight, and no value.

With l = sum 2^(s - m) and the sink z of the row's head, in base 2,
    m' = max(m, z),  f = 2^(m - m'),  l' = f l + 2^(z - m');  O is f sum 2^(s - m) v / l'.

Source: Xiao et al. 2023.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
# No number of base 2 is farther from 0.
FARTHEST = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def sink_level(sinks, head):
    """A head's sink in base 2; of a number, a number.

    The bounds also keep the product apart from differences: fused with one, as what is left of two
    large levels it would give what rounding took from one of them.
    """
    sink = gl.load(sinks + head).to(gl.float32)
    level = gl.minimum(gl.maximum(sink * LOG2E, -FARTHEST), FARTHEST)
    return gl.where(gl.abs(sink) < float("inf"), level, sink)


@gluon.jit
def with_sink(total, shift, sinks, head):
    """(sums, what scores are taken from, the factor of other sums), with the sink of ``head``."""
    level = sink_level(sinks, head)
    new_shift = gl.maximum(shift, level)
    # Where a row sees nothing, and the sink is -inf, nothing is taken off: weights are 0.
    base = gl.where(new_shift == -float("inf"), 0.0, new_shift)
    factor = gl.exp2(shift - base)
    return total * factor + gl.exp2(level - base), new_shift, factor
