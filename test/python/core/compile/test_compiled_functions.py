"""The functions under torch.compile: one graph, and the values and gradients of eager calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch

from tilewright import nn, ops
from tilewright.errors import BindingError, NotSupportedError
from tilewright.ops.custom import is_traced

pytestmark = pytest.mark.L0


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(generator: torch.Generator, rows: int = 5, keys: int = 7) -> list[torch.Tensor]:
    return [draw(generator, 2, *shape, 8) for shape in ((4, rows), (2, keys), (2, keys))]


def packed(generator: torch.Generator) -> list[torch.Tensor]:
    operands = [draw(generator, 5, 4, 8), draw(generator, 7, 2, 8), draw(generator, 7, 2, 8)]
    return [*operands, torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])]


def as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# name -> (function, its operands; those of a floating type get gradients).
CASES: dict[str, tuple[Callable[..., Any], Callable[[torch.Generator], list[torch.Tensor]]]] = {
    "sdpa": (lambda q, k, v: ops.sdpa(q, k, v, causal=True, align="bottom_right"), qkv),
    "sdpa_stats": (
        lambda q, k, v: ops.sdpa(q, k, v, window=(2, None), soft_cap=3.0, return_stats=True),
        qkv,
    ),
    "sdpa_bias_sink_gate": (
        lambda q, k, v, b, s, g: ops.sdpa(q, k, v, bias=b, sink=s, gate=g, alibi=True),
        lambda g: [*qkv(g), draw(g, 4, 5, 7), draw(g, 4), draw(g, 2, 4, 5, 8)],
    ),
    "sdpa_mask": (
        lambda q, k, v, m: ops.sdpa(q, k, v, mask=m, scale=0.3),
        lambda g: [*qkv(g), torch.ones(5, 7, dtype=torch.bool).tril(2)],
    ),
    "sdpa_lengths": (
        lambda q, k, v, n: ops.sdpa(q, k, v, seqlens_kv=n),
        lambda g: [*qkv(g), torch.tensor([3, 7])],
    ),
    "sdpa_dropout": (
        lambda q, k, v, s: ops.sdpa(q, k, v, dropout_p=0.25, seed=s, offset=3),
        lambda g: [*qkv(g), torch.tensor([11])],
    ),
    "sdpa_varlen": (
        lambda q, k, v, a, b: ops.sdpa_varlen(
            q, k, v, a, b, 3, 4, causal=True, return_stats=True, stats_layout="token_major"
        ),
        packed,
    ),
    "rms_norm": (
        lambda x, w, b: ops.rms_norm(x, w, b, offset=1.0),
        lambda g: [draw(g, 2, 3, 8), draw(g, 8), draw(g, 8)],
    ),
    "layer_norm": (
        lambda x, w, b, r: ops.layer_norm(x, w, b, residual=r),
        lambda g: [draw(g, 2, 3, 8), draw(g, 8), draw(g, 8), draw(g, 2, 3, 8)],
    ),
    "group_norm": (
        lambda x, w, b: ops.group_norm(x, 2, w, b),
        lambda g: [draw(g, 2, 6, 3, 4), draw(g, 6), draw(g, 6)],
    ),
    "sdpa_decode": (
        lambda q, k, v, n: ops.sdpa_decode(q, k, v, n, return_stats=True),
        lambda g: [*qkv(g, 2, 7), torch.tensor([3, 7])],
    ),
    "rope": (
        lambda x, n: ops.rope(x, torch.cos(n.double()), torch.sin(n.double()), rotary_dim=6),
        lambda g: [draw(g, 2, 4, 5, 8), torch.arange(15).view(5, 3)],
    ),
    "linear": (
        lambda x, w, b: ops.linear(x, w, b, activation="gelu"),
        lambda g: [draw(g, 2, 3, 8), draw(g, 6, 8), draw(g, 6)],
    ),
    "linear_glu": (
        lambda x, w: ops.linear(x, w, glu="halves"),
        lambda g: [draw(g, 2, 3, 8), draw(g, 6, 8)],
    ),
    "conv1d_causal": (
        lambda x, w, b: ops.conv1d_causal(x, w, b, activation="silu", return_final_state=True),
        lambda g: [draw(g, 2, 6, 3), draw(g, 3, 4), draw(g, 3)],
    ),
    "conv1d_causal_packed": (
        lambda x, w, s, n: ops.conv1d_causal(x, w, initial_state=s, cu_seqlens=n),
        lambda g: [draw(g, 1, 6, 3), draw(g, 3, 4), draw(g, 2, 3, 3), torch.tensor([0, 2, 5])],
    ),
}


def gradients(function: Callable[..., Any], operands: list[torch.Tensor]) -> list[Any]:
    """Results, then the gradient of a loss that weighs each element of each differently."""
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in operands]
    results = as_tuple(function(*leaves))
    weights = [torch.arange(1, r.numel() + 1, dtype=r.dtype).view(r.shape) for r in results]
    torch.autograd.backward(results, weights)
    return [*(r.detach() for r in results), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("sdpa", None), ("layer_norm", None), ("linear_glu", None), *((name, True) for name in CASES)],
)
def test_compiled_equals_eager(name: str, dynamic: bool | None) -> None:
    function, make = CASES[name]
    operands = make(torch.Generator().manual_seed(1))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected, found = gradients(function, operands), gradients(compiled, operands)
    for left, right in zip(expected, found, strict=True):
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)
    with torch.no_grad():
        pairs = zip(as_tuple(function(*operands)), as_tuple(compiled(*operands)), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def counting_backend() -> tuple[Any, list[torch.fx.GraphModule]]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    return backend, graphs


def test_a_trace_holds_one_operator_a_call() -> None:
    backend, graphs = counting_backend()
    q, k, v = qkv(torch.Generator().manual_seed(2))
    torch.compile(lambda: ops.sdpa(q, k, v), fullgraph=True, backend=backend)()
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.tilewright.sdpa.default in calls


def test_dynamic_shapes_take_one_graph() -> None:
    backend, graphs = counting_backend()
    compiled = torch.compile(
        lambda q, k, v: ops.sdpa(q, k, v, causal=True),
        fullgraph=True,
        backend=backend,
        dynamic=True,
    )
    generator = torch.Generator().manual_seed(3)
    for rows, keys in ((5, 7), (6, 9), (11, 4)):
        q, k, v = qkv(generator, rows, keys)
        assert torch.equal(compiled(q, k, v), ops.sdpa(q, k, v, causal=True))
    assert len(graphs) == 1


# name -> (function, its operands): the first's extents are symbols, the others' numbers.
BROADCAST: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "bias": (lambda q, k, b: ops.sdpa(q, k, k, bias=b), [(2, 4, 5, 8), (2, 2, 7, 8), (5, 7)]),
    "mask": (
        lambda q, k, b: ops.sdpa(q, k, k, mask=b > 0),
        [(2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 5, 7)],
    ),
    "positions": (
        lambda x, t: ops.rope(x, t, t, positions=torch.arange(5)),
        [(2, 4, 5, 8), (9, 4)],
    ),
}


def test_a_longest_length_may_be_read_of_a_tensor(generator: torch.Generator) -> None:
    """Then a trace knows nothing of it, not even that it is above 0."""

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_kv: Any) -> Any:
        longest = [int(cu.diff().max()) for cu in (cu_q, cu_kv)]
        return ops.sdpa_varlen(q, k, v, cu_q, cu_kv, *longest, causal=True)

    operands = packed(generator)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for prefix in (operands[3], torch.tensor([0, 5, 5])):
            operands[3] = prefix
            torch.testing.assert_close(compiled(*operands), attend(*operands))


@pytest.mark.parametrize("name", BROADCAST)
def test_symbolic_extents_fit_those_that_are_known(name: str) -> None:
    function, shapes = BROADCAST[name]
    generator = torch.Generator().manual_seed(20)
    operands = [draw(generator, *shape) for shape in shapes]
    for axis in range(3):
        torch._dynamo.maybe_mark_dynamic(operands[0], axis)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), function(*operands))


def test_decoding_step_of_a_convolution() -> None:
    generator = torch.Generator().manual_seed(21)
    x, w = draw(generator, 2, 3), draw(generator, 3, 4)
    states = [draw(torch.Generator().manual_seed(22), 2, 3, 3) for _ in range(2)]
    compiled = torch.compile(ops.conv1d_causal_update, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, states[0], w), ops.conv1d_causal_update(x, states[1], w))
    assert torch.equal(*states) and torch.equal(states[0][..., -1], x)


def test_paged_attention() -> None:
    generator = torch.Generator().manual_seed(4)
    q, pages = draw(generator, 2, 4, 1, 8), draw(generator, 6, 4, 2, 8)
    table, used = torch.tensor([[3, 1], [0, 5]]), torch.tensor([6, 8])

    def call(q: Any, pages: Any, table: Any, used: Any) -> Any:
        return ops.sdpa_paged(q, pages, pages * 2, table, used, causal=True, return_stats=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for left, right in zip(
        call(q, pages, table, used), compiled(q, pages, table, used), strict=True
    ):
        assert torch.equal(left, right)


def test_output_buffers_and_in_place_rotation() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k, v = qkv(generator)
    x, w = draw(generator, 3, 8), draw(generator, 6, 8)
    table = draw(generator, 5, 4)

    def call(o: Any, y: Any, z: Any, r: Any) -> None:
        ops.sdpa(q, k, v, out=o)
        ops.rms_norm(x, out=y)
        ops.linear(x, w, out=z)
        ops.rope(r, table, table, inplace=True)

    buffers = [[torch.zeros(2, 4, 5, 8), torch.zeros(3, 8), torch.zeros(3, 6)] for _ in range(2)]
    turned = [q.clone(), q.clone()]
    call(*buffers[0], turned[0])
    torch.compile(call, fullgraph=True, backend="aot_eager")(*buffers[1], turned[1])
    for left, right in zip([*buffers[0], turned[0]], [*buffers[1], turned[1]], strict=True):
        assert torch.equal(left, right) and left.count_nonzero()


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "group_norm", "linear"])
def test_an_output_buffer_of_8_bits_saturates_in_a_trace_too(
    name: str, generator: torch.Generator
) -> None:
    x, large = draw(generator, 3, 8), torch.full((8,), 1e6)
    calls: dict[str, Callable[[torch.Tensor], Any]] = {
        "rms_norm": lambda out: ops.rms_norm(x, large, out=out),
        "layer_norm": lambda out: ops.layer_norm(x, large, out=out),
        "group_norm": lambda out: ops.group_norm(x, 2, large, out=out),
        "linear": lambda out: ops.linear(x, large.diag(), out=out),
    }
    # PyTorch's own conversion to this type gives infinities.
    eager, traced = (torch.zeros(3, 8, dtype=torch.float8_e5m2) for _ in range(2))
    calls[name](eager)
    torch.compile(calls[name], fullgraph=True, backend="eager")(traced)
    assert torch.equal(eager.float(), traced.float())
    assert eager.float().abs().max() == 57344


def test_dropout_draws_a_new_seed_at_each_compiled_call() -> None:
    q, k, v = qkv(torch.Generator().manual_seed(6))
    call = lambda: ops.sdpa(q, k, v, dropout_p=0.5)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.manual_seed(7)
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(call(), first)


class Layer(torch.nn.Module):
    """Norms, projections, rotation and attention of one transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.RMSNorm(width), nn.LayerNorm(width)
        self.qkv = torch.nn.Parameter(torch.empty(3 * width, width))
        self.up = torch.nn.Parameter(torch.empty(4 * width, width))
        self.down = torch.nn.Parameter(torch.empty(width, 2 * width))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        joined = ops.linear(self.before(x), self.qkv)
        parts = joined.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (ops.rope(part, angles.cos(), angles.sin()) for part in parts[:2])
        o = ops.sdpa(q, k, parts[2], causal=True)
        x = x + o.transpose(1, 2).reshape(batch, length, width)
        return x + ops.linear(ops.linear(self.after(x), self.up, glu="halves"), self.down)


def test_a_module_compiles_whole() -> None:
    generator = torch.Generator().manual_seed(8)
    eager, compiled = Layer(16, 2), Layer(16, 2)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.copy_(draw(generator, *parameter.shape) * 0.3)
    compiled.load_state_dict(eager.state_dict())
    call = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (6, 9):
        x, angles = draw(generator, 2, length, 16), draw(generator, length, 4)
        left, right = eager(x, angles), call(x, angles)
        assert torch.equal(left, right)
        left.square().sum().backward()
        right.square().sum().backward()
    for name, parameter in eager.named_parameters():
        other = compiled.get_parameter(name)
        assert parameter.grad is not None and other.grad is not None
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-6, atol=1e-6)


_double = torch.library.custom_op(
    "tilewright_test::double_attention",
    lambda q, k, v: ops.sdpa(q, k, v) * 2,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v) -> Tensor",
)
_double.register_fake(lambda q, k, v: torch.empty_like(q))
_seen: list[tuple[bool, type]] = []


def _double_backward(ctx: Any, grad: torch.Tensor) -> Any:
    """Not a gradient: a backward that calls a function of ours is what matters here."""
    _seen.append((torch.compiler.is_compiling(), type(grad)))
    q, k, _ = ctx.saved_tensors
    return ops.sdpa(q, k, ops.rms_norm(grad)), None, None


_double.register_autograd(
    _double_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pytest.mark.parametrize("way", ["compile", "aot_alone"])
def test_the_trace_of_a_backward_reaches_no_address(way: str) -> None:
    # F1: AOT Autograd traces a custom operator's backward after the compiler, or without one.
    generator = torch.Generator().manual_seed(9)
    q, k, v = (draw(generator, 2, 2, 4, 8) for _ in range(3))
    left, right = q.clone().requires_grad_(), q.clone().requires_grad_()

    call = torch.ops.tilewright_test.double_attention

    if way == "compile":
        traced = torch.compile(
            lambda *operands: call(*operands), fullgraph=True, backend="aot_eager"
        )
    else:
        traced = aot_function(lambda *operands: call(*operands), fw_compiler=nop)
    _seen.clear()
    result = traced(right, k, v)
    assert _seen and all(kind is not torch.Tensor for _, kind in _seen)
    if way == "aot_alone":
        assert not any(compiling for compiling, _ in _seen)
    result.square().sum().backward()
    call(left, k, v).square().sum().backward()
    assert left.grad is not None and right.grad is not None
    assert torch.equal(left.grad, right.grad)


def test_traces_without_the_compiler() -> None:
    generator = torch.Generator().manual_seed(10)
    q, k, v = qkv(generator)
    traced = make_fx(lambda q, k, v: ops.sdpa(q, k, v, causal=True))(q, k, v)
    assert any(node.target is torch.ops.tilewright.sdpa.default for node in traced.graph.nodes)
    q, k, v = qkv(generator)
    assert torch.equal(traced(q, k, v), ops.sdpa(q, k, v, causal=True))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (q, k, v)]
        o, stats = ops.sdpa(*fakes, return_stats=True)
    real, real_stats = ops.sdpa(q, k, v, return_stats=True)
    for fake, made in ((o, real), (stats, real_stats)):
        assert type(fake) is not torch.Tensor
        assert (fake.shape, fake.stride(), fake.dtype) == (made.shape, made.stride(), made.dtype)


WRITTEN_DOWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "sdpa": lambda x: ops.sdpa(x, x, x, causal=True, seqlens_kv=torch.ones(x.shape[0]).int()),
    "group_norm": lambda x: ops.group_norm(x, 2),
    "rope": lambda x: ops.rope(x, torch.ones(x.shape[2], 4), torch.ones(x.shape[2], 4)),
    "layer_norm": lambda x: ops.layer_norm(x, torch.ones(8)),
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(8)),
    "linear": lambda x: ops.linear(x, torch.ones(6, 8), activation="gelu"),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_what_jit_writes_down_serves_other_shapes(name: str, generator: torch.Generator) -> None:
    function = WRITTEN_DOWN[name]
    given = draw(generator, 2, 4, 5, 8).requires_grad_()
    written = torch.jit.trace(function, given, check_trace=False)
    other = draw(generator, 3, 4, 9, 8).requires_grad_()
    found, expected = written(other), function(other)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.square().sum(), other)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_what_jit_writes_down_runs_with_and_without_gradients(
    name: str, generator: torch.Generator
) -> None:
    function = WRITTEN_DOWN[name]
    given = draw(generator, 2, 4, 5, 8)
    # PyTorch checks a trace by a second one, which it makes without gradients.
    wanting = torch.jit.trace(function, given.requires_grad_())
    with torch.no_grad():
        plain = torch.jit.trace(function, given.detach())
    expected = function(given)
    (gradient,) = torch.autograd.grad(expected.square().sum(), given)
    for written in (wanting, plain):
        found = written(given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), given)[0], gradient)
        with torch.no_grad():
            torch.testing.assert_close(written(given), expected)


@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_an_export_that_was_made_without_gradients_says_so(
    name: str, generator: torch.Generator
) -> None:
    class Whole(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return WRITTEN_DOWN[name](x)

    given = draw(generator, 2, 4, 5, 8)
    exported = torch.export.export(Whole(), (given,)).module()
    wanting = given.clone().requires_grad_()
    if name == "rope":
        # Its backward reads nothing that a call without gradients does not have.
        exported(wanting).sum().backward()
        return
    with pytest.raises(BindingError, match="make the trace, or the export, outside"):
        exported(wanting).sum().backward()


def test_refusals_of_operators() -> None:
    q, k, v = qkv(torch.Generator().manual_seed(11))
    with FakeTensorMode() as mode, pytest.raises(NotSupportedError, match="stream"):
        ops.sdpa(*(mode.from_tensor(t) for t in (q, k, v)), stream=7)
    with pytest.raises(BindingError, match="want_statistics"):
        torch.ops.tilewright.rms_norm(q.requires_grad_(), None, None, 1e-6, 0.0, False, None)


def test_eager_calls_go_past_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an eager call went through its operator")

    from tilewright.ops import attention_dispatch, grouped_norm, normalization, products, rotary

    monkeypatch.setattr(attention_dispatch, "attend_by_operator", refuse)
    monkeypatch.setattr(normalization, "OPERATORS", {})
    monkeypatch.setattr(grouped_norm, "_group_norm", refuse)
    monkeypatch.setattr(products, "_linear", refuse)
    monkeypatch.setattr(rotary, "_rope", refuse)
    generator = torch.Generator().manual_seed(12)
    for name, (function, make) in CASES.items():
        assert gradients(function, make(generator)), name


def test_modes_of_other_threads_do_not_make_a_call_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that leave their modes in the order they entered them, not the reverse."""
    # torch's own flag, which this leaves set, is put back afterwards.
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False, raising=False)
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with FakeTensorMode():
            first_in.set()
            assert second_in.wait(10)
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        with FakeTensorMode():
            second_in.set()
            assert first_out.wait(10)

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not is_traced(torch.ones(1))
    with FakeTensorMode():
        assert is_traced(torch.ones(1))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize], ids=["vmap", "func"])
def test_a_transform_without_a_rule_says_so(transform: Any) -> None:
    x = torch.ones(2, 3, 8)
    with pytest.raises(NotSupportedError, match=r"layer_norm: called inside a torch\.func"):
        transform(lambda t: ops.layer_norm(t))(x)
    # Outside of it all is as before.
    assert torch.count_nonzero(ops.layer_norm(x)) == 0
