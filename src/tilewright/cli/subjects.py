"""Benchmark subjects: one call of ours and one of PyTorch's on the same inputs.

A subject makes its inputs and both calls; ``measure`` runs the two in turns, so that whatever
slows the machine slows both, and reports medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tilewright.cli.exits import CommandError, ExitCode

Call = Callable[[], object]
_SEED = 0
_WARM_UP_CALLS = 3


@dataclass(frozen=True)
class Pair:
    """Our call and PyTorch's, and where each leaves its result.

    ``promised_ratio`` bounds our median over theirs, ``promised_overhead_us`` the difference.
    ``calls`` launches are timed together, so that reading the clock does not count. ``turns``
    samples are taken a round.
    """

    case: str
    baseline: str
    ours: Call
    theirs: Call
    our_result: Callable[[], torch.Tensor]
    their_result: Callable[[], torch.Tensor]
    calls: int = 1
    turns: int = 1
    promised_ratio: float | None = None
    promised_overhead_us: float | None = None


@dataclass(frozen=True)
class Measurement:
    """Medians of one pair, in microseconds a call."""

    subject: str
    case: str
    baseline: str
    ours_us: float
    theirs_us: float
    samples: int
    promised_ratio: float | None
    promised_overhead_us: float | None

    @property
    def ratio(self) -> float:
        """Our median over theirs."""
        return self.ours_us / self.theirs_us

    @property
    def overhead_us(self) -> float:
        """Our median less theirs."""
        return self.ours_us - self.theirs_us

    @property
    def promise(self) -> str:
        """The bound, as text; empty if none is promised."""
        if self.promised_ratio is not None:
            return f"ratio <= {self.promised_ratio:g}"
        if self.promised_overhead_us is not None:
            return f"overhead <= {self.promised_overhead_us:g} us"
        return ""

    @property
    def is_kept(self) -> bool | None:
        """Whether the bound holds; None if none is promised."""
        if self.promised_ratio is not None:
            return self.ratio <= self.promised_ratio
        if self.promised_overhead_us is not None:
            return self.overhead_us <= self.promised_overhead_us
        return None


def measure(subject: str, pair: Pair, rounds: int) -> Measurement:
    """Time both calls of a pair in turns, ``rounds`` times its own; the first to go alternates.

    Raises:
        CommandError: if the two results differ: no time of a wrong result is worth telling.
    """
    for _ in range(_WARM_UP_CALLS):
        pair.ours()
        pair.theirs()
    _require_equal(subject, pair)
    samples: dict[bool, list[float]] = {True: [], False: []}
    for index in range(rounds * pair.turns):
        for is_ours in (True, False) if index % 2 == 0 else (False, True):
            call = pair.ours if is_ours else pair.theirs
            samples[is_ours].append(_time_us(call, pair.calls))
    return Measurement(
        subject,
        pair.case,
        pair.baseline,
        statistics.median(samples[True]),
        statistics.median(samples[False]),
        len(samples[True]),
        pair.promised_ratio,
        pair.promised_overhead_us,
    )


def matmul_execute() -> Iterator[Pair]:
    """Host time of a one-operation graph over the ATen call that it makes."""
    from tilewright.planning.graph import Graph

    generator = torch.Generator().manual_seed(_SEED)
    a, b = (torch.randn(1, 64, 64, generator=generator).to(_device()) for _ in range(2))
    ours, theirs = torch.empty_like(a), torch.empty_like(a)
    graph = Graph("matmul", io_data_type=torch.float32)
    left, right = graph.tensor_like(a, name="A"), graph.tensor_like(b, name="B")
    product = graph.matmul(left, right).set_output(True)
    graph.build()
    pack = {left: a, right: b, product: ours}
    frame = graph.bind(pack)
    for case, call in (
        ("graph.execute", lambda: graph.execute(pack)),
        ("frame.launch", frame.launch),
    ):
        yield Pair(
            f"{case} 64x64x64 float32",
            "torch.matmul(out=)",
            call,
            lambda: torch.matmul(a, b, out=theirs),
            lambda: ours,
            lambda: theirs,
            calls=20,
            turns=10,
            promised_overhead_us=15.0,
        )


def sdpa() -> Iterator[Pair]:
    """Attention of torch tensors."""
    yield _attention(causal=False, promised_ratio=1.05)
    yield _attention(causal=True)


def layer_norm() -> Iterator[Pair]:
    """LayerNorm over the last axis."""
    from tilewright import ops

    [x], weight, bias = _normal((1024, 1024), 1), *_normal((1024,), 2)
    yield _functions(
        "1024x1024 float32",
        "layer_norm",
        lambda: ops.layer_norm(x, weight, bias),
        lambda: torch.nn.functional.layer_norm(x, (1024,), weight, bias),
        turns=5,
    )


def rms_norm() -> Iterator[Pair]:
    """RMSNorm over the last axis."""
    from tilewright import ops

    [x], [weight] = _normal((1024, 1024), 1), _normal((1024,), 1)
    yield _functions(
        "1024x1024 float32",
        "rms_norm",
        lambda: ops.rms_norm(x, weight, eps=1e-6),
        lambda: torch.nn.functional.rms_norm(x, (1024,), weight, eps=1e-6),
        turns=5,
    )


def linear() -> Iterator[Pair]:
    """A linear layer with bias."""
    from tilewright import ops

    [x], [weight], [bias] = _normal((128, 1024), 1), _normal((1024, 1024), 1), _normal((1024,), 1)
    yield _functions(
        "128x1024x1024 float32",
        "linear",
        lambda: ops.linear(x, weight, bias),
        lambda: torch.nn.functional.linear(x, weight, bias),
        turns=5,
    )


SUBJECTS: dict[str, Callable[[], Iterator[Pair]]] = {
    "matmul-execute": matmul_execute,
    "sdpa": sdpa,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "linear": linear,
}


def _device() -> torch.device:
    from tilewright.launch.handles import default_device

    return default_device()


def _normal(shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    return [torch.randn(shape, generator=generator).to(_device()) for _ in range(count)]


def _attention(*, causal: bool, promised_ratio: float | None = None) -> Pair:
    from tilewright import ops

    q, k, v = _normal((1, 8, 1024, 64), 3)
    return _functions(
        "1x8x1024x64 float32" + (" causal" if causal else ""),
        "scaled_dot_product_attention",
        lambda: ops.sdpa(q, k, v, causal=causal),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),
        promised_ratio,
    )


def _functions(
    case: str,
    baseline: str,
    ours: Callable[[], object],
    theirs: Callable[[], torch.Tensor],
    promised_ratio: float | None = None,
    turns: int = 1,
) -> Pair:
    def our_tensor() -> torch.Tensor:
        result = ours()
        if isinstance(result, tuple):
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"expected a tensor, got {type(result).__name__}")
        return result

    return Pair(
        *(case, baseline, ours, theirs, our_tensor, theirs),
        turns=turns,
        promised_ratio=promised_ratio,
    )


def uses_processor_time() -> bool:
    """True where a call's work is this process's own single thread, which has a clock of its own.

    That clock stands still while another process has the processor, so that a busy machine slows
    what is measured, and does not add to it.
    """
    return torch.get_num_threads() == 1 and not torch.cuda.is_available()


def _time_us(call: Call, calls: int) -> float:
    clock = time.process_time if uses_processor_time() else time.perf_counter
    _synchronize()
    start = clock()
    for _ in range(calls):
        call()
    _synchronize()
    return (clock() - start) * 1e6 / calls


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _require_equal(subject: str, pair: Pair) -> None:
    # Two float32 computations of one thing: 1e-3 tells a wrong one from a rounded one.
    if not torch.allclose(pair.our_result(), pair.their_result(), rtol=1e-3, atol=1e-3):
        difference = (pair.our_result() - pair.their_result()).abs().max()
        raise CommandError(
            f"{subject} {pair.case}: our result differs from {pair.baseline} by "
            f"{float(difference):.3g}",
            ExitCode.WRONG_RESULT,
        )
