"""How torch's operations act on jets: linear ones per channel, the others by chain and product."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jet import RULES, Cell, Jet, LinearUse, Tape, Unsupported, rule
from .scheme import ChainTerm, ProductTerm
from .towers import TOWERS, Tower

#: entries of a constant that is copied rather than watched: copying 4,096 numbers takes 5 µs, about
#: two calls of torch
_SMALL = 2**12


# --- chain rule ------------------------------------------------------------------------------


def elementwise(build: Tower, a: Jet, **options: Any) -> Jet:
    """f∘a: value f, first derivatives f'·∂a, the higher by Faà di Bruno."""
    scheme = a.scheme
    f = build(a.value, scheme.order, **options)

    def first() -> Tensor:
        if not scheme.order:
            return a.first
        return f[1] * a.first

    def sum_partitions(terms: Sequence[ChainTerm]) -> Tensor:
        total: Tensor | None = None
        for term in terms:
            if a.affine and max(term.blocks) >= scheme.first.stop:
                continue  # only products of first derivatives do not vanish
            channels = map(a.channel, term.blocks)
            product = reduce(operator.mul, channels, f[len(term.blocks)])
            total = _add_multiple(total, term.multiplicity, product)
        assert total is not None
        return total

    def laplacian() -> Tensor:
        curvature = f[2] * select_laplacian_axes(a).square().sum(0)
        if a.affine:
            return curvature
        return curvature + f[1] * a.higher[-1]

    higher: list[Cell] = [partial(sum_partitions, terms) for terms in scheme.chain]
    if scheme.laplacian:
        higher.append(laplacian)
    return a.replace_channels(f[0], first, higher)


def select_laplacian_axes(a: Jet) -> Tensor:
    """Return the first derivatives along the Laplacian's axes.

    If these are all axes, no index is taken: its backward pass would copy.
    """
    axes = a.scheme.laplacian_positions
    if axes == slice(0, len(a.first)):
        return a.first
    return a.first[axes]


def _add_multiple(total: Tensor | None, count: int, x: Tensor) -> Tensor:
    """Return total + count·x; None is an empty sum."""
    if count != 1:
        x = count * x
    if total is None:
        return x
    return total + x


def _apply_elementwise(build: Tower, a: Any, *args: Any, **kwargs: Any) -> Jet:
    """Return f(a) for the jet a, with torch's positional options of f as keywords of its tower."""
    if not isinstance(a, Jet):
        raise Unsupported("an elementwise function with a jet among its options")
    if kwargs.pop("inplace", False):
        raise Unsupported("an activation that overwrites its input")
    if args:  # options of the tower, in torch's order
        names = list(inspect.signature(build).parameters)[2:]
        if len(args) > len(names) or "inplace" in names[: len(args)]:
            raise Unsupported("an elementwise function with these options")
        kwargs.update(zip(names, args, strict=False))
    return elementwise(build, a, **kwargs)


for _function, _build in TOWERS.items():
    RULES[_function] = partial(_apply_elementwise, _build)


@rule(torch.pow, Tensor.pow, Tensor.__pow__)
def power(a: Any, exponent: Any) -> Jet:
    """a^c for a constant number c."""
    if not isinstance(a, Jet) or not isinstance(exponent, (int, float)):
        raise Unsupported("pow with an exponent that is no number")
    return elementwise(TOWERS[torch.pow], a, exponent=float(exponent))


# --- product rule ----------------------------------------------------------------------------


def bilinear(op: Callable[[Tensor, Tensor], Tensor], a: Jet, b: Jet) -> Jet:
    """op(a, b) by Leibniz; with a Laplacian aΔb + bΔa + 2Σ ∂a∂b."""
    scheme = a.scheme

    def first() -> Tensor:
        return op(a.first, b.value) + op(a.value, b.first)

    def sum_splits(terms: Sequence[ProductTerm]) -> Tensor:
        total: Tensor | None = None
        for term in terms:
            product = op(a.channel(term.left), b.channel(term.right))
            total = _add_multiple(total, term.multiplicity, product)
        assert total is not None
        return total

    def laplacian() -> Tensor:
        mixed = op(select_laplacian_axes(a), select_laplacian_axes(b)).sum(0)
        return op(a.higher[-1], b.value) + op(a.value, b.higher[-1]) + 2 * mixed

    higher: list[Cell] = [partial(sum_splits, terms) for terms in scheme.leibniz]
    if scheme.laplacian:
        higher.append(laplacian)
    return a.replace_channels(op(a.value, b.value), first, higher)


def _check_constant(value: Any, jet: Jet) -> Any:
    """Return a constant that broadcasts to the trailing axes of all channels; refuse others."""
    if isinstance(value, Tensor) and value.ndim > jet.ndim:
        raise Unsupported("a constant with more axes than the jet")
    return value


def _defer(value: Any) -> Callable[[], Any]:
    """Return a function that gives the constant later, when a derivative is first read.

    The network may overwrite a tensor meanwhile: small ones are copied, and for others the function
    raises `Unsupported` then.
    """
    if not isinstance(value, Tensor):
        return lambda: value
    if not value.requires_grad and value.numel() <= _SMALL:
        value = value.clone()
    version = value._version

    def read() -> Tensor:
        if value._version != version:
            raise Unsupported("a constant that is changed after its use")
        return value

    return read


@rule(torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul)
def multiply(a: Any, b: Any) -> Jet:
    """The product of two jets, or of a jet and a constant."""
    if isinstance(a, Jet) and isinstance(b, Jet):
        return bilinear(torch.mul, *align_axes(a, b))
    if not isinstance(a, Jet):
        a, b = b, a
    constant = _defer(_check_constant(b, a))
    return a.map_channels(lambda x, _: x * constant())


@rule(torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__)
def divide(a: Any, b: Any) -> Jet:
    """a/b = a·b⁻¹."""
    if isinstance(b, Jet):
        return multiply(a, RULES[torch.reciprocal](b))
    constant = _defer(_check_constant(b, a))
    return a.map_channels(lambda x, _: x / constant())


@rule(Tensor.__rtruediv__)
def divide_into(a: Jet, b: Any) -> Jet:
    """b/a, for Python's operator."""
    return divide(b, a)


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
def matmul(a: Any, b: Any) -> Jet:
    """Matrix products; those with a constant act per channel."""
    if isinstance(a, Jet) and isinstance(b, Jet):
        if a.ndim != b.ndim or a.ndim < 2:
            raise Unsupported("a matrix product of jets with different numbers of axes")
        return bilinear(torch.matmul, a.expand_channels(), b.expand_channels())
    if isinstance(a, Jet):
        if b.ndim > max(a.ndim, 2):
            raise Unsupported("a matrix product with a constant of more axes")
        if a.ndim == 1:
            a = a.expand_channels()
        right = _defer(b)
        return a.map_channels(lambda x, _: x @ right())
    if b.ndim < 2 or a.ndim > b.ndim:
        raise Unsupported("a matrix product with a constant of more axes")
    left = _defer(a)
    return b.expand_channels().map_channels(lambda x, _: left() @ x)


# --- linear ----------------------------------------------------------------------------------


@rule(F.linear)
def linear(a: Any, weight: Tensor, bias: Tensor | None = None) -> Jet:
    """Return W a for all channels, with the bias on the value; the tape records parameters."""
    if not isinstance(a, Jet) or isinstance(weight, Jet) or isinstance(bias, Jet):
        raise Unsupported("a linear layer whose weight is a jet")
    if a.ndim < 2:
        a = a.expand_channels()
    has_points = a.ndim >= 2 and weight.ndim == 2
    if a.tape is None or not has_points or a.shape[0] != a.tape.points:
        return _apply_affine(a, weight, bias)
    return _record_affine(a, weight, bias, a.tape)


def _record_affine(a: Jet, weight: Tensor, bias: Tensor | None, tape: Tape) -> Jet:
    """Return W a + b and record the use on the tape, if W or b is one of its parameters."""
    weight_name = tape.names.get(id(weight))
    bias_name = tape.names.get(id(bias))
    if weight_name is None and bias_name is None:
        return _apply_affine(a, weight, bias)
    if weight_name is not None:
        weight = weight.detach()
    if bias is not None and bias_name is not None:
        bias = bias.detach()
    # each point has cotangents of its own, which are taken at these tensors
    out = _apply_affine(a, weight, bias).expand_channels().map_channels(_require_grad)
    tape.uses.append(LinearUse(weight_name, bias_name, a, out))
    return out


def _require_grad(x: Tensor, front: int) -> Tensor:
    """Return a channel with `requires_grad` set."""
    if x.requires_grad:
        return x
    return x.requires_grad_()


def _apply_affine(a: Jet, weight: Tensor, bias: Tensor | None) -> Jet:
    """Return W a + b, where b adds to the value only."""
    w = _defer(weight)
    return a.map_channels(lambda x, _: F.linear(x, w()), value=F.linear(a.value, weight, bias))


def align_axes(a: Jet, b: Jet) -> tuple[Jet, Jet]:
    """Return both jets with as many axes, so that the axis of derivatives does not broadcast."""
    ndim = max(a.ndim, b.ndim)

    def add_axes(jet: Jet) -> Jet:
        missing = [1] * (ndim - jet.ndim)
        if not missing:
            return jet
        return jet.expand_channels().map_channels(
            lambda x, n: x.reshape(*x.shape[:n], *missing, *x.shape[n:])
        )

    return add_axes(a), add_axes(b)


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add)
def add(a: Any, b: Any, *, alpha: float = 1) -> Jet:
    """Return a + alpha·b; a constant adds to the value only."""
    if isinstance(a, Jet) and isinstance(b, Jet):
        a, b = align_axes(a, b)
        return a.map_channels(lambda x, y, _: x + alpha * y, b)
    if isinstance(a, Jet):
        value = a.value + alpha * _check_constant(b, a)
        jet = a
    else:
        jet = b.map_channels(lambda x, _: alpha * x)
        value = _check_constant(a, jet) + jet.value
    if value.shape == jet.shape:  # channels that are the same at all points stay one copy
        return jet.map_channels(lambda x, _: x, value=value)
    return jet.map_channels(lambda x, n: x.expand(*x.shape[:n], *value.shape), value=value)


@rule(torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__)
def subtract(a: Any, b: Any, *, alpha: float = 1) -> Jet:
    """a − alpha·b."""
    return add(a, b, alpha=-alpha)


@rule(Tensor.__rsub__)
def subtract_from(a: Jet, b: Any) -> Jet:
    """b − a, for Python's operator."""
    return add(negative(a), b)


@rule(torch.neg, Tensor.neg, Tensor.__neg__, torch.negative)
def negative(a: Jet) -> Jet:
    """−a."""
    return a.map_channels(lambda x, _: -x)
