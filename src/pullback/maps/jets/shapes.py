"""Operations that act on every channel of a jet alike: joining, reshaping, sums, copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jet import RULES, Jet, Unsupported, rule


def _shift_axis(dim: int, front: int) -> int:
    """Return the number of an axis once `front` axes are put in front."""
    if dim < 0:
        return dim
    return dim + front


def _join(op: Any, items: Sequence[Any], dim: int = 0) -> Jet:
    """Return `torch.cat` or `torch.stack` of jets and constants."""
    jet = next(item for item in items if isinstance(item, Jet))

    def to_jet(item: Any) -> Jet:
        if isinstance(item, Jet):
            return item.expand_channels()
        zero = torch.zeros_like(item)
        first = zero.expand(jet.scheme.first.stop - 1, *item.shape)
        return jet.replace_channels(item, first, [zero] * len(jet.higher), affine=True)

    def join_channels(*arguments: Any) -> Tensor:
        *channels, front = arguments
        return op(channels, dim=_shift_axis(dim, front))

    first, *others = (to_jet(item) for item in items)
    return first.map_channels(join_channels, *others)


for _function in (torch.cat, torch.concat, torch.concatenate, torch.stack):
    RULES[_function] = partial(_join, _function)


@rule(torch.transpose, Tensor.transpose)
def transpose(a: Jet, dim0: int, dim1: int) -> Jet:
    """Per channel."""

    def transpose_channel(x: Tensor, front: int) -> Tensor:
        return x.transpose(_shift_axis(dim0, front), _shift_axis(dim1, front))

    return a.expand_channels().map_channels(transpose_channel)


def _reshape(function: Any, a: Jet, *args: Any, **named: Any) -> Jet:
    """Return the jet with all channels in the shape that the function gives to the value."""
    shape = function(a.value, *args, **named).shape
    return a.expand_channels().map_channels(lambda x, n: x.reshape(*x.shape[:n], *shape))


for _function in (torch.unsqueeze, torch.squeeze, torch.flatten, torch.reshape):
    RULES[_function] = RULES[getattr(Tensor, _function.__name__)] = partial(_reshape, _function)
RULES[Tensor.reshape] = RULES[Tensor.view] = partial(_reshape, Tensor.reshape)


@rule(torch.chunk, Tensor.chunk)
def chunk(a: Jet, chunks: int, dim: int = 0) -> Any:
    """Per channel."""
    return split(a, -(-a.shape[dim] // chunks), dim)


@rule(torch.split, Tensor.split)
def split(a: Jet, split_size: Any, dim: int = 0) -> Any:
    """Per channel."""

    def split_channel(x: Tensor, front: int) -> tuple[Tensor, ...]:
        return x.split(split_size, _shift_axis(dim, front))

    return _map_to_several(split_channel, a)


@rule(torch.unbind, Tensor.unbind)
def unbind(a: Jet, dim: int = 0) -> Any:
    """Per channel."""

    def unbind_channel(x: Tensor, front: int) -> tuple[Tensor, ...]:
        return x.unbind(_shift_axis(dim, front))

    return _map_to_several(unbind_channel, a)


def _map_to_several(op: Callable[[Tensor, int], tuple[Tensor, ...]], a: Jet) -> tuple[Jet, ...]:
    """Return the jets of a linear operation with several results."""
    jet = a.expand_channels()
    count = len(op(a.value, 0))
    return tuple(jet.map_channels(lambda x, front, i=i: op(x, front)[i]) for i in range(count))


def _reduce_features(op: str, a: Jet, dim: Any = None, keepdim: bool = False) -> Jet:
    """Return the sum or mean over axes of features; not over points."""
    if dim is None:
        axes = range(a.ndim)
    elif isinstance(dim, int):
        axes = (dim,)
    else:
        axes = dim
    if any(axis % a.ndim == 0 for axis in axes):
        raise Unsupported(f"{op} over the points")
    return a.map_channels(
        lambda x, n: getattr(x, op)([_shift_axis(axis, n) for axis in axes], keepdim=keepdim)
    )


for _name in ("sum", "mean"):
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = partial(_reduce_features, _name)


@rule(Tensor.contiguous, Tensor.clone)
def copy(a: Jet) -> Jet:
    """Return the jet itself: channels are never written to, so no copy is needed."""
    return a


@rule(Tensor.to, Tensor.double, Tensor.float, Tensor.type)
def refuse_conversion(*args: Any, **kwargs: Any) -> Jet:
    """Raise `Unsupported`: all channels of a jet have one dtype and device."""
    raise Unsupported("a conversion of dtype or device inside the network")


@rule(F.dropout)
def dropout(a: Jet, p: float = 0.5, training: bool = True, inplace: bool = False) -> Jet:
    """Return the jet itself; raise `Unsupported` in training mode."""
    if training and p > 0:
        raise Unsupported("dropout in training mode")
    return a


def _constant_like(make: Any, a: Jet, *args: Any, **kwargs: Any) -> Tensor:
    return make(a.value.detach(), *args, **kwargs)


for _make in (torch.zeros_like, torch.ones_like, torch.full_like):
    RULES[_make] = partial(_constant_like, _make)
