"""How the functions become operators of PyTorch, and when a call goes through them or autograd.

Kernels take addresses, so a trace must see a call as one operator with a fake, never its inside.
That the compiler runs does not tell all: it does not while AOT Autograd traces a backward, nor
under ``make_fx`` or ``FakeTensorMode`` alone. A dispatch mode, or a tensor of another class, does.
A view that PyTorch negates when it is read goes the same way: the dispatcher makes it real.

Eager calls go past the dispatcher, which would cost more time than all else on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tilewright.errors import BindingError, NotSupportedError

NAMESPACE = "tilewright"
_modes_on_stack = torch._C._len_torch_dispatch_stack
# Of torch.jit.trace, which writes down each of PyTorch's calls and would keep a plan's numbers.
_is_written_down = torch._C._is_tracing
_ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))


def is_traced(*operands: torch.Tensor | None) -> bool:
    """True if a call with these operands must go through its registered operator."""
    # The stack is the thread's own; torch's is_in_torch_dispatch_mode() is one flag for all
    # threads, which two that enter and leave modes at once can leave set.
    if torch.compiler.is_dynamo_compiling() or _modes_on_stack() or _is_written_down():
        return True
    # A loop, which takes a third of the time of any(): this is asked at each eager call.
    for operand in operands:
        if type(operand) not in _ORDINARY or (operand is not None and operand.is_neg()):
            return True
    return False


def needs_gradient(*operands: torch.Tensor | None) -> bool:
    """True if a call with these operands takes part in autograd."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)


def forbid_gradient(function: str, rule: str, *operands: torch.Tensor | None) -> None:
    """Refuse a call that would take part in autograd, which it drops.

    Raises:
        NotSupportedError: naming the function and the rule.
    """
    if needs_gradient(*operands):
        raise NotSupportedError(f"{function}: an operand requires grad; {rule}, use torch.no_grad")


def serves_gradients(*operands: torch.Tensor | None) -> bool:
    """True if a traced call with these operands must make what its backward reads.

    What torch.jit.trace writes down runs with gradients and without, whichever it was made with:
    it is not traced again, and PyTorch's own check of it is a trace of the other kind.
    """
    # The compiler, which makes a graph for each mode, cannot ask of jit.
    is_written_down = not torch.compiler.is_dynamo_compiling() and _is_written_down()
    return is_written_down or needs_gradient(*operands)


def made_without_gradients(flag: str) -> BindingError:
    """What to raise where an operator did not keep what its backward reads, as ``flag`` says."""
    return BindingError(
        f"{flag}: False where an operand requires grad; must be True: make the trace, or the "
        "export, outside of torch.no_grad and with operands that require grad"
    )


def store(out: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``out`` with ``made`` in it. FP8 saturates, as it does in a plan's own stores."""
    if out.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(out.dtype).max
        made = made.clamp(-largest, largest)
    return out.copy_(made)


def require_engine(engine: Any) -> None:
    """Require an engine's name, or None.

    Raises:
        BindingError: for anything else.
    """
    if engine is not None and not isinstance(engine, str):
        raise BindingError(f"engine: got {engine!r}; expected an engine's name, or None")


def require_operator_arguments(engine: Any, stream: Any) -> None:
    """Require what a traced call's operator takes; it runs on its device's current stream.

    Raises:
        BindingError: if ``engine`` is no name.
        NotSupportedError: if a stream is named.
    """
    require_engine(engine)
    if stream is not None:
        raise NotSupportedError(
            "stream: given in a traced call; expected None, and a torch.cuda.stream around it"
        )


def register(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Register ``tilewright::name`` and return the operator, called with all its arguments.

    ``compute`` returns new tensors, of the shapes, strides and types that ``fake`` tells. ``setup``
    (ctx, inputs, output) and ``backward`` (ctx, *gradients) are its autograd; without them it has
    none.
    """
    qualified = f"{NAMESPACE}::{name}"
    operator = torch.library.custom_op(qualified, compute, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=setup)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def wanted_gradients(ctx: Any, gradients: Iterable[Any]) -> tuple[Any, ...]:
    """The gradients of an operator's backward, None for an input that needs none."""
    pairs = zip(gradients, ctx.needs_input_grad, strict=False)
    return tuple(gradient if needs else None for gradient, needs in pairs)


def in_layout_of(model: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """``made`` with the strides that ``torch.empty_like(model)`` has, as a tensor of its own."""
    like = torch.empty_like(model)
    if made.stride() == like.stride() and made._base is None:
        return made
    return like.copy_(made)


def nothing(like: torch.Tensor) -> torch.Tensor:
    """What stands for an output that was not asked for: operators return tensors alone."""
    return like.new_empty(0)
