"""Operations that act on every channel of a jet alike: joining, reshaping, sums, copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jet import RULES, Jet, Unsupported, rule


def _shifted(dim: int, front: int) -> int:
    """An axis where `front` more axes lie in front."""
    if dim < 0:
        return dim
    return dim + front


def _joined(op: Any, items: Sequence[Any], dim: int = 0) -> Jet:
    """Constants among the items have no derivatives."""
    jet = next(i for i in items if isinstance(i, Jet))

    def constant(x: Tensor) -> Jet:
        zero = torch.zeros_like(x)
        count = jet.scheme.first.stop - 1
        return jet.like(x, zero.expand(count, *x.shape), [zero] * len(jet.higher), affine=True)

    first, *rest = (i.full() if isinstance(i, Jet) else constant(i) for i in items)
    return first.each(lambda *given: op(given[:-1], dim=_shifted(dim, given[-1])), *rest)


for _function in (torch.cat, torch.concat, torch.concatenate, torch.stack):
    RULES[_function] = partial(_joined, _function)


@rule(torch.transpose, Tensor.transpose)
def transpose(a: Jet, dim0: int, dim1: int) -> Jet:
    """Per channel."""
    return a.full().each(lambda x, n: x.transpose(_shifted(dim0, n), _shifted(dim1, n)))


def _reshaped(function: Any, a: Jet, *args: Any, **named: Any) -> Jet:
    """Every channel in the shape that the value gets."""
    shape = function(a.value, *args, **named).shape
    return a.full().each(lambda x, n: x.reshape(*x.shape[:n], *shape))


for _function in (torch.unsqueeze, torch.squeeze, torch.flatten, torch.reshape):
    RULES[_function] = RULES[getattr(Tensor, _function.__name__)] = partial(_reshaped, _function)
RULES[Tensor.reshape] = RULES[Tensor.view] = partial(_reshaped, Tensor.reshape)


@rule(torch.chunk, Tensor.chunk)
def chunk(a: Jet, chunks: int, dim: int = 0) -> Any:
    """Per channel."""
    return split(a, -(-a.shape[dim] // chunks), dim)


@rule(torch.split, Tensor.split)
def split(a: Jet, split_size: Any, dim: int = 0) -> Any:
    """Per channel."""
    count = len(a.value.split(split_size, dim))
    return tuple(
        a.full().each(lambda x, n, i=i: x.split(split_size, _shifted(dim, n))[i])
        for i in range(count)
    )


@rule(torch.unbind, Tensor.unbind)
def unbind(a: Jet, dim: int = 0) -> Any:
    """Per channel."""
    return tuple(
        a.full().each(lambda x, n, i=i: x.unbind(_shifted(dim, n))[i]) for i in range(a.shape[dim])
    )


def _over(op: str, a: Jet, dim: Any = None, keepdim: bool = False) -> Jet:
    """Sums and means over features."""
    if dim is None:
        axes = range(a.ndim)
    elif isinstance(dim, int):
        axes = (dim,)
    else:
        axes = dim
    if any(axis % a.ndim == 0 for axis in axes):
        raise Unsupported(f"{op} over the points")
    return a.each(
        lambda x, n: getattr(x, op)([_shifted(axis, n) for axis in axes], keepdim=keepdim)
    )


for _name in ("sum", "mean"):
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = partial(_over, _name)


@rule(Tensor.contiguous, Tensor.clone)
def same(a: Jet) -> Jet:
    """Channels are never written to, so a copy is not needed."""
    return a


@rule(Tensor.to, Tensor.double, Tensor.float, Tensor.type)
def converted(*args: Any, **kwargs: Any) -> Jet:
    """A jet lives in one precision."""
    raise Unsupported("a conversion of dtype or device inside the network")


@rule(F.dropout)
def dropout(a: Jet, p: float = 0.5, training: bool = True, inplace: bool = False) -> Jet:
    """Nothing in evaluation."""
    if training and p > 0:
        raise Unsupported("dropout in training mode")
    return a


def _constant_like(make: Any, a: Jet, *args: Any, **kwargs: Any) -> Tensor:
    return make(a.value.detach(), *args, **kwargs)


for _make in (torch.zeros_like, torch.ones_like, torch.full_like):
    RULES[_make] = partial(_constant_like, _make)
