"""torch.func's transforms and forward-mode derivatives: refused by name, never wrong in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tilewright import ops
from tilewright.errors import NotSupportedError

pytestmark = pytest.mark.L0

# name in the message -> (function of one operand, the operand)
FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "sdpa": (lambda x: ops.sdpa(x, x, x), torch.ones(1, 2, 3, 4)),
    "rms_norm": (ops.rms_norm, torch.ones(3, 4)),
    "layer_norm": (ops.layer_norm, torch.ones(3, 4)),
    "group_norm": (lambda x: ops.group_norm(x, 2), torch.ones(3, 4)),
    "rope": (lambda x: ops.rope(x, x[0, 0, :, 2:], x[0, 0, :, :2]), torch.ones(1, 2, 3, 4)),
    "linear": (lambda x: ops.linear(x, x), torch.ones(3, 4)),
    "conv1d_causal": (lambda x: ops.conv1d_causal(x, x[0]), torch.ones(1, 3, 3)),
    "quantize": (lambda x: ops.quantize(x, "mxfp8_e4m3"), torch.ones(3, 32)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tangent_is_refused(name: str) -> None:
    # layer_norm had one, by PyTorch's own function; a kernel would have had none, silently.
    function, x = FUNCTIONS[name]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotSupportedError, match=f"{name}: an operand has a tangent"):
            function(dual)
        # Tensors without one are welcome meanwhile.
        function(x)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("quantize", "rope")])
def test_a_gradient_transform_is_refused(name: str) -> None:
    function, x = FUNCTIONS[name]
    with pytest.raises(NotSupportedError, match=f"{name}: called inside a torch.func transform"):
        torch.func.grad(lambda x: function(x).sum())(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batching_transform_is_refused(name: str) -> None:
    function, x = FUNCTIONS[name]
    with pytest.raises(NotSupportedError, match=f"{name}: called inside a torch.func transform"):
        torch.func.vmap(function)(x[None])


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n not in ("quantize", "rope")])
def test_gradients_in_batches_are_refused(name: str) -> None:
    # By a rule of its own: PyTorch's error is that a tensor has no storage.
    function, x = FUNCTIONS[name]
    x = x.clone().requires_grad_()
    y = function(x)
    with pytest.raises(NotSupportedError, match=f"{name}.*: gradients came in batches"):
        torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)
