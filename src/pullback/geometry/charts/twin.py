r"""Twins: the same network in other affine coordinates, with weights of its own.

Every layer sees inputs Ωa + γ and gives outputs in coordinates that Φ· + τ maps back. In a twin
made by `twin` any module may hold the layers; they remain `Linear` and `Conv` layers, so methods
that know layers (K-FAC) treat both networks alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn

from ..._core.errors import PullbackError
from .affine import Change, Coordinates, Wrapped, drawn, is_layer, layers, same, scaled, wrapped

Between = Callable[[nn.Module], nn.Module]


def random_coordinates(
    model: nn.Module, generator: torch.Generator, *, shifted: bool = True
) -> Coordinates:
    """Random coordinates everywhere; without γ if not `shifted`."""
    found = layers(model)
    inputs = [drawn(m.weight.shape[1], generator) for m in found]
    outputs = [drawn(m.weight.shape[0], generator) for m in found]
    return Coordinates(inputs if shifted else [c.linear() for c in inputs], outputs)


def twin(model: nn.Module, to: Coordinates, between: Between | None = None) -> nn.Module:
    """The same function in other coordinates; what lies between layers belongs to φ.

    Inputs and outputs stay in the old coordinates: the first and the last change are applied
    inside. `between` computes φ† by itself, where it has a name of its own: it gives the modules
    that follow one layer of a `Sequential` and precede another, and no change is applied there.
    """
    found = layers(model)
    refuse_shared(model)
    if not len(found) == len(to.inputs) == len(to.outputs):
        raise PullbackError(
            "The coordinates do not fit the model",
            f"it has {len(found)} linear and convolution layers, the coordinates are for "
            f"{len(to.inputs)} inputs and {len(to.outputs)} outputs",
            "Give one change per layer and side, `same(n)` where nothing changes",
        )
    if between is not None:
        return _chained(model, to, between)
    changes = zip(to.inputs, to.outputs, strict=True)
    memo: dict[int, object] = {id(m): wrapped(m, *c) for m, c in zip(found, changes, strict=True)}
    # a copy finds the layers already copied; one that is used in two places stays one layer
    if isinstance(model, nn.Sequential):
        return nn.Sequential(*(p for m in model for p in _spliced(copy.deepcopy(m, memo))))
    return copy.deepcopy(model, memo)  # pyright: ignore[reportReturnType]


def _spliced(module: nn.Module) -> list[nn.Module]:
    return list(module) if isinstance(module, Wrapped) else [module]


def _chained(model: nn.Module, to: Coordinates, between: Between) -> nn.Module:
    modules, number, last = list[nn.Module](), 0, len(to.outputs) - 1
    for module in chain(model):
        if not is_layer(module):
            inner = 0 < number <= last
            modules.append(between(module) if inner else copy.deepcopy(module))
            continue
        parts = list(wrapped(module, to.inputs[number], to.outputs[number]))
        at = next(i for i, m in enumerate(parts) if is_layer(m))
        modules += parts[0 if number == 0 else at : None if number == last else at + 1]
        number += 1
    return nn.Sequential(*modules)


def chain(model: nn.Module) -> list[nn.Module]:
    """The modules that a (nested) `Sequential` applies one after the other."""
    if isinstance(model, nn.Sequential):
        return [m for child in model for m in chain(child)]
    if is_layer(model) or not any(is_layer(m) for m in model.modules()):
        return [model]
    raise PullbackError(
        "The order of the model's layers is not known",
        f"{type(model).__name__} holds layers in a way of its own",
        "Write the network as an nn.Sequential, or use a transformation that changes layers one by "
        "one (transformations.Affine, Whitening)",
    )


def refuse_shared(model: nn.Module) -> None:
    """Raise where a layer's weight also serves elsewhere: it would have to change in two ways."""
    slots: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is None:
                continue
            name = f"{path}.{key}" if path else key
            before = slots.setdefault(id(p), name)
            if before != name:
                raise PullbackError(
                    "A weight is shared by two layers",
                    f"{before!r} and {name!r} are one tensor, and each layer has coordinates "
                    "of its own",
                    "Untie them, or use a diffeomorphism of the parameters (`reparametrize`)",
                )


def tanh_twin(model: nn.Module, first: Change | None = None) -> nn.Module:
    """A sigmoid network as a tanh network: tanh(z) = 2σ(2z) − 1, so Φ = 2, Ω = 2 and γ = −1.

    Luk and Grosse (2018) print the two directions swapped. `first` changes the inputs as well.
    """
    return _renamed(model, nn.Sigmoid, nn.Tanh, 2.0, -1.0, first)


def sigmoid_twin(model: nn.Module, first: Change | None = None) -> nn.Module:
    """A tanh network as a sigmoid network: σ(z) = ½tanh(z/2) + ½, so Φ = Ω = γ = ½."""
    return _renamed(model, nn.Tanh, nn.Sigmoid, 0.5, 0.5, first)


def _renamed(
    model: nn.Module,
    old: type[nn.Module],
    new: type[nn.Module],
    by: float,
    shift: float,
    first: Change | None,
) -> nn.Module:
    """φ†(z†) = by·φ(by·z†) + shift is `new`, where φ is `old`."""
    inner = chain(model)
    places = [i for i, m in enumerate(inner) if is_layer(m)]
    if not places:
        raise PullbackError(
            "The model has no layers",
            f"no linear or convolution layer was found in {type(model).__name__}",
            f"Give a Sequential of layers with {old.__name__} between them",
        )
    for one, two in pairwise(places):
        if [type(m) for m in inner[one + 1 : two] if not isinstance(m, nn.Flatten)] != [old]:
            raise PullbackError(
                f"The network is no {old.__name__} network",
                f"between two layers stands {[type(m).__name__ for m in inner[one + 1 : two]]}",
                f"Put exactly one nn.{old.__name__} between the layers",
            )
    sizes = [m.weight.shape for m in inner if is_layer(m)]
    start = same(sizes[0][1]) if first is None else first
    inputs = [start, *(scaled(s[1], by, shift) for s in sizes[1:])]
    outputs = [*(scaled(s[0], by) for s in sizes[:-1]), same(sizes[-1][0])]
    return twin(
        model,
        Coordinates(inputs, outputs),
        lambda m: new() if isinstance(m, old) else copy.deepcopy(m),
    )
