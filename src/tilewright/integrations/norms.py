"""Swap a model's LayerNorm and RMSNorm modules for those of ``tilewright.nn``, and back.

PyTorch's own classes are known by their ``forward``. Every library of models writes its own
RMSNorm, so those are known by what they compute: a module that holds one vector named ``weight``,
an epsilon and nothing else is run once on a few random rows, with a random weight in place of its
own, and swapped if the result is, in float32, that of

    x / sqrt(mean(x^2) + eps) * weight          the Llama and T5 families
    x / sqrt(mean(x^2) + eps) * (1 + weight)    the Gemma family
    (x - mean(x)) / sqrt(var(x) + eps) * weight the Cohere family

Anything else (a gated norm, a norm with several inputs, a norm over other axes) stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch

from tilewright import nn

# The attributes under which libraries keep their epsilon.
_EPSILON_NAMES = ("eps", "variance_epsilon", "epsilon")
# How far two float32 ways to write one formula lie apart, for results of size one.
_PROBE_TOLERANCE = 1e-4
# Rows of ordinary and of very small values: in the small ones the epsilon weighs as much as x.
_PROBE_SCALES = (1.0, 3.0, 1e-3, 1e-5)
# Where a new module keeps the one whose place it took: in a tuple, so that the old one is not a
# submodule of the new one and its parameters do not appear twice.
_ORIGINAL = "_tilewright_original"


def replace_norms(model: torch.nn.Module) -> int:
    """Swap ``model``'s normalization modules for Tilewright's, in place; return how many.

    The new modules share the parameters, the training flag and the hooks of the old ones, and keep
    their names in the state dict. A module that is used at several places is swapped once and
    stays shared. The results have the type of the input, and are rounded once.

    Raises:
        TypeError: if ``model`` is itself such a module: it has no parent to swap it in.
    """
    if _replacement(model) is not None:
        raise TypeError(
            f"model: got a {type(model).__name__}, itself a normalization; expected a module that "
            "holds some"
        )
    swapped: dict[torch.nn.Module, torch.nn.Module | None] = {}
    for parent, name, child in _children(model):
        if child not in swapped:
            swapped[child] = _replacement(child)
        replacement = swapped[child]
        if replacement is not None:
            parent._modules[name] = replacement
    return sum(replacement is not None for replacement in swapped.values())


def restore_norms(model: torch.nn.Module) -> int:
    """Undo ``replace_norms`` in place; return how many modules came back.

    They come back with the parameters that the model has now, which may be others than at the
    swap: after ``load_state_dict(assign=True)``, for example.
    """
    restored: dict[torch.nn.Module, torch.nn.Module] = {}
    for parent, name, child in _children(model):
        kept = child.__dict__.get(_ORIGINAL)
        if kept is None:
            continue
        if child not in restored:
            original: torch.nn.Module = kept[0]
            for parameter in original._parameters:
                original._parameters[parameter] = child._parameters[parameter]
            original.training = child.training
            restored[child] = original
        parent._modules[name] = restored[child]
    return len(restored)


def _children(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Every (parent, name, child) below ``model``, with each shared parent once."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None:
                yield parent, name, child


def _replacement(module: torch.nn.Module) -> torch.nn.Module | None:
    """Tilewright's module for this one, or None if it is no normalization that we know."""
    if _ORIGINAL in module.__dict__ or isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return None
    # A forward set on the instance, as accelerate does, is the owner's: it would be lost.
    if "forward" in module.__dict__:
        return None
    made = _of_torch(module) or _of_a_library(module)
    if made is None:
        return None
    # Every name, the missing bias too, so that the state dict and attribute access stay the same.
    made._parameters = {**dict.fromkeys(made._parameters), **module._parameters}
    made.training = module.training
    for name, value in vars(module).items():
        if name.endswith("_hooks") or "_hooks_" in name:
            made.__dict__[name] = value
    made.__dict__[_ORIGINAL] = (module,)
    return made


def _of_torch(module: torch.nn.Module) -> torch.nn.Module | None:
    """For PyTorch's two classes, and for subclasses that leave ``forward`` alone."""
    forward = type(module).forward
    if isinstance(module, torch.nn.LayerNorm) and forward is torch.nn.LayerNorm.forward:
        if len(module.normalized_shape) != 1:
            return None
        return nn.LayerNorm(
            module.normalized_shape, module.eps, module.elementwise_affine, device="meta"
        )
    if isinstance(module, torch.nn.RMSNorm) and forward is torch.nn.RMSNorm.forward:
        if len(module.normalized_shape) != 1:
            return None
        return nn.RMSNorm(
            module.normalized_shape, module.eps, module.elementwise_affine, device="meta"
        )
    return None


def _of_a_library(module: torch.nn.Module) -> torch.nn.Module | None:
    """For the classes that libraries of models write themselves, known by what they compute."""
    if "norm" not in type(module).__name__.lower() or not _is_one_vector(module):
        return None
    eps = next((vars(module)[name] for name in _EPSILON_NAMES if name in vars(module)), None)
    if not isinstance(eps, float):
        return None
    width = module._parameters["weight"].shape[0]  # type: ignore[union-attr]
    generator = torch.Generator().manual_seed(width)
    scales = torch.tensor(_PROBE_SCALES).unsqueeze(1)
    x = scales * (torch.randn(len(_PROBE_SCALES), width, generator=generator) + 0.5)
    weight = torch.randn(width, generator=generator)
    found = _run_probe(module, x, weight)
    if found is None:
        return None
    inverse_rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    centred = x - x.mean(-1, keepdim=True)
    inverse_deviation = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if _same(found, x * inverse_rms * weight):
        return nn.RMSNorm(width, eps, device="meta")
    if _same(found, x * inverse_rms * (1.0 + weight)):
        return nn.RMSNorm(width, eps, device="meta", offset=1.0)
    if _same(found, centred * inverse_deviation * weight):
        return nn.LayerNorm(width, eps, bias=False, device="meta")
    return None


def _is_one_vector(module: torch.nn.Module) -> bool:
    """Whether the module holds a vector ``weight``, nothing else, and takes one argument."""
    if module._modules or module._buffers or list(module._parameters) != ["weight"]:
        return False
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1 or weight.shape[0] < 2:
        return False
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL


def _run_probe(
    module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor | None:
    """What the module computes with another weight, on the CPU and without its hooks."""
    twin = object.__new__(type(module))
    twin.__dict__.update(vars(module), _parameters={"weight": torch.nn.Parameter(weight)})
    with torch.no_grad():
        try:
            found = type(module).forward(twin, x)
        # Any failure means that the module expects something else, so it is not one of ours.
        except Exception:
            return None
    return found if isinstance(found, torch.Tensor) else None


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(
        found.float(), expected, rtol=_PROBE_TOLERANCE, atol=_PROBE_TOLERANCE * 1e-2
    )
