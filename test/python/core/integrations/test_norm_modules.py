"""The modules of ``tilewright.nn``, and swapping a model's norms for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright import nn
from tilewright.errors import BindingError, NotSupportedError
from tilewright.integrations.norms import replace_norms, restore_norms

pytestmark = pytest.mark.L0

WIDTH = 24


class LlamaKind(torch.nn.Module):
    """How most libraries write RMSNorm."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class LlamaRMSNorm(LlamaKind):
    """Under a name that says what it is."""


class GemmaRMSNorm(LlamaKind):
    """Gemma's stores w - 1."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        torch.nn.init.zeros_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (x * (1.0 + self.weight.float())).type_as(hidden_states)


class CohereLayerNorm(LlamaKind):
    """A LayerNorm without a bias."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * x).to(hidden_states.dtype)


class GatedRMSNorm(LlamaKind):
    """Takes a gate, so it is another operation."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = super().forward(hidden_states)
        return out if gate is None else out * torch.sigmoid(gate)


class OutsideEpsilonRMSNorm(LlamaKind):
    """Adds the epsilon to the root, not under it: another formula."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


class FirstLayerNorm(torch.nn.LayerNorm):
    """A LayerNorm over another axis than the last."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.transpose(-1, -2)).transpose(-1, -2)


SWAPPED = [
    lambda: torch.nn.LayerNorm(WIDTH),
    lambda: torch.nn.LayerNorm(WIDTH, eps=1e-12, bias=False),
    lambda: torch.nn.LayerNorm(WIDTH, elementwise_affine=False),
    lambda: torch.nn.RMSNorm(WIDTH),
    lambda: torch.nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False),
    LlamaRMSNorm,
    lambda: LlamaRMSNorm(eps=1e-5),
    GemmaRMSNorm,
    CohereLayerNorm,
]
KEPT = [
    LlamaKind,
    GatedRMSNorm,
    OutsideEpsilonRMSNorm,
    lambda: FirstLayerNorm(WIDTH),
    lambda: torch.nn.LayerNorm((3, WIDTH)),
    lambda: torch.nn.BatchNorm1d(WIDTH),
    lambda: torch.nn.Linear(WIDTH, WIDTH),
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=index + 1))
    return model


@pytest.mark.parametrize("make", SWAPPED)
def test_a_swapped_norm_computes_the_same(make: Callable[[], Any]) -> None:
    model = randomized(torch.nn.Sequential(make()))
    # Rows large and small: in the small ones the epsilon counts.
    scale = torch.tensor([1.0, 30.0, 1e-3, 1e-5]).view(4, 1)
    x = ((draw(2, 4, WIDTH) + 0.3) * scale).requires_grad_()
    gradient = draw(2, 4, WIDTH, seed=9)
    found = []
    for swap in (False, True):
        if swap:
            assert replace_norms(model) == 1
            assert isinstance(model[0], (nn.LayerNorm, nn.RMSNorm))
        y = model(x)
        grads = torch.autograd.grad(y, [x, *model.parameters()], gradient)
        found.append((y, *grads))
    for before, after in zip(*found, strict=True):
        size = before.abs().max().item()
        torch.testing.assert_close(after, before, atol=2e-6 * max(size, 1.0), rtol=1e-4)


@pytest.mark.parametrize("make", KEPT)
def test_another_module_stays(make: Callable[[], Any]) -> None:
    model = torch.nn.Sequential(make())
    before = model[0]
    assert replace_norms(model) == 0
    assert model[0] is before


def test_the_state_dict_keeps_its_names_and_the_parameters_are_shared() -> None:
    model = torch.nn.ModuleDict(
        {"a": torch.nn.LayerNorm(WIDTH), "b": torch.nn.Sequential(GemmaRMSNorm())}
    )
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    assert replace_norms(model) == 2
    after = dict(model.named_parameters())
    assert list(model.state_dict()) == names
    assert all(after[name] is parameter for name, parameter in before.items())
    assert after.keys() == before.keys()


def test_restoring_brings_the_very_modules_back() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(4, 4), LlamaRMSNorm())
    before = list(model)
    assert restore_norms(model) == 0
    assert replace_norms(model) == 2
    assert replace_norms(model) == 0
    model.train(False)
    model[2].weight = torch.nn.Parameter(draw(WIDTH))
    assert restore_norms(model) == 2
    assert list(model) == before
    assert not before[0].training
    assert torch.equal(before[2].weight, draw(WIDTH))


def test_a_shared_module_stays_shared() -> None:
    norm = LlamaRMSNorm()
    model = torch.nn.ModuleDict({"a": norm, "b": torch.nn.Sequential(norm)})
    assert replace_norms(model) == 1
    assert model["a"] is model["b"][0]
    assert restore_norms(model) == 1
    assert model["a"] is norm and model["b"][0] is norm


def test_hooks_go_with_the_module() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH))
    calls: list[str] = []
    handle = model[0].register_forward_hook(lambda *_: calls.append("called"))
    replace_norms(model)
    model(draw(2, WIDTH))
    assert calls == ["called"]
    handle.remove()
    model(draw(2, WIDTH))
    assert calls == ["called"]


def test_a_forward_set_on_the_instance_is_left_alone() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH))
    model[0].forward = lambda x: x
    assert replace_norms(model) == 0


def test_the_model_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="itself a normalization"):
        replace_norms(LlamaRMSNorm())


def test_a_copy_of_a_swapped_model_works_and_restores() -> None:
    model = randomized(torch.nn.Sequential(GemmaRMSNorm()))
    replace_norms(model)
    twin = copy.deepcopy(model)
    x = draw(3, WIDTH)
    assert torch.equal(twin(x), model(x))
    assert twin[0].weight is not model[0].weight
    assert restore_norms(twin) == 1
    torch.testing.assert_close(twin(x), model(x))


def test_a_model_on_the_meta_device_is_swapped() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(GemmaRMSNorm(), torch.nn.LayerNorm(WIDTH))
    assert replace_norms(model) == 2
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_round_once(dtype: torch.dtype) -> None:
    model = randomized(torch.nn.Sequential(LlamaRMSNorm())).to(dtype)
    x = draw(5, WIDTH).to(dtype)
    exact = model.double()(x.double())
    model.to(dtype)
    replace_norms(model)
    y = model(x)
    assert y.dtype is dtype
    spacing = torch.finfo(dtype).eps * exact.abs()
    # Half a spacing, and a little for the sum of squares in float32.
    assert ((y.double() - exact).abs() <= 0.51 * spacing + 1e-7).all()


def test_layer_norm_is_torchs_in_all_but_the_computation() -> None:
    theirs = torch.nn.LayerNorm(WIDTH, eps=1e-3)
    ours = nn.LayerNorm(WIDTH, eps=1e-3)
    ours.load_state_dict(theirs.state_dict())
    x = draw(2, 3, WIDTH)
    assert repr(ours) == repr(theirs)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-5)


def test_rms_norm_starts_as_a_plain_normalization() -> None:
    x = draw(2, WIDTH)
    plain = nn.RMSNorm(WIDTH, eps=1e-6)
    offset = nn.RMSNorm(WIDTH, eps=1e-6, offset=1.0)
    assert torch.equal(offset.weight, torch.zeros(WIDTH))
    torch.testing.assert_close(offset(x), plain(x))
    assert "offset=1.0" in repr(offset)
    without = nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False, offset=1.0)
    torch.testing.assert_close(without(x), plain(x))


def test_rms_norm_takes_the_epsilon_of_the_type() -> None:
    x = draw(2, WIDTH) * 1e-4
    torch.testing.assert_close(nn.RMSNorm(WIDTH)(x), torch.nn.RMSNorm(WIDTH)(x))


@pytest.mark.parametrize("module", [nn.LayerNorm, nn.RMSNorm])
def test_two_axes_are_declined(module: Any) -> None:
    with pytest.raises(NotSupportedError, match=r"normalized_shape \(3, 4\) has 2 axes"):
        module((3, 4))


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_what_is_no_float_tensor_is_refused_by_name(kind: Any) -> None:
    # RMSNorm asked for the epsilon of integers.
    for x in (torch.ones(WIDTH, dtype=torch.int32), [1.0] * WIDTH):
        with pytest.raises(BindingError, match=r"^x: "):
            kind(WIDTH)(x)
