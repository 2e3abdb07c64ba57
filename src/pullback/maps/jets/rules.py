"""How torch's operations act on jets: linear ones per channel, the others by chain and product."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jet import RULES, Cell, Jet, Unsupported, Used, rule
from .towers import TOWERS, Tower

_SMALL = 2**12  # entries of a constant that is copied rather than watched


# --- chain rule ------------------------------------------------------------------------------


def elementwise(build: Tower, a: Jet, **options: Any) -> Jet:
    """f∘a: value f, first derivatives f'·∂a, the higher by Faà di Bruno."""
    scheme = a.scheme
    f = build(a.value, scheme.order, **options)

    def summed(terms: list[tuple[int, tuple[int, ...]]]) -> Tensor:
        if a.affine:  # only products of first derivatives are left
            terms = [(n, c) for n, c in terms if max(c) < scheme.first.stop]
        shares = [_times(n, reduce(operator.mul, map(a.channel, c), f[len(c)])) for n, c in terms]
        return sum(shares[1:], shares[0])

    def laplacian() -> Tensor:
        bent = f[2] * collapsed(a).square().sum(0)
        if a.affine:
            return bent
        return bent + f[1] * a.higher[-1]

    higher: list[Cell] = [partial(summed, terms) for terms in scheme.chain]
    if scheme.laplacian:
        higher.append(laplacian)
    return a.like(f[0], lambda: f[1] * a.first if scheme.order else a.first, higher)


def collapsed(a: Jet) -> Tensor:
    """The first derivatives along the Laplacian's axes; all of them are no copy in reverse."""
    some = a.scheme.collapsed
    if some == slice(0, len(a.first)):
        return a.first
    return a.first[some]


def _times(count: int, x: Tensor) -> Tensor:
    if count == 1:
        return x
    return count * x


def _on_jet(build: Tower, a: Any, *args: Any, **kwargs: Any) -> Jet:
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
    RULES[_function] = partial(_on_jet, _build)


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
    x = a.channel
    y = b.channel

    def summed(terms: list[tuple[int, int, int]]) -> Tensor:
        shares = [_times(n, op(x(i), y(j))) for n, i, j in terms]
        return sum(shares[1:], shares[0])

    def laplacian() -> Tensor:
        mixed = op(collapsed(a), collapsed(b)).sum(0)
        return op(a.higher[-1], b.value) + op(a.value, b.higher[-1]) + 2 * mixed

    higher: list[Cell] = [partial(summed, terms) for terms in scheme.leibniz]
    if scheme.laplacian:
        higher.append(laplacian)
    return a.like(op(a.value, b.value), lambda: op(a.first, b.value) + op(a.value, b.first), higher)


def _constant(value: Any, jet: Jet) -> Any:
    """A factor without derivatives, aligned with the trailing axes of every channel."""
    if isinstance(value, Tensor) and value.ndim > jet.ndim:
        raise Unsupported("a constant with more axes than the jet")
    return value


def _kept(value: Any) -> Callable[[], Any]:
    """The constant, for use later on: derivatives are computed when they are asked for."""
    if isinstance(value, Tensor) and not value.requires_grad and value.numel() <= _SMALL:
        value = value.clone()  # which the network may overwrite meanwhile
    if not isinstance(value, Tensor):
        return lambda: value
    version = value._version

    def same() -> Tensor:
        if value._version != version:
            raise Unsupported("a constant that is changed after its use")
        return value

    return same


@rule(torch.mul, torch.multiply, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, operator.mul)
def multiply(a: Any, b: Any) -> Jet:
    """The product of two jets, or of a jet and a constant."""
    if isinstance(a, Jet) and isinstance(b, Jet):
        return bilinear(torch.mul, *aligned(a, b))
    jet, other = (a, b) if isinstance(a, Jet) else (b, a)
    constant = _kept(_constant(other, jet))
    return jet.each(lambda x, _: x * constant())


@rule(torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__)
def divide(a: Any, b: Any) -> Jet:
    """a/b = a·b⁻¹."""
    if isinstance(b, Jet):
        return multiply(a, RULES[torch.reciprocal](b))
    constant = _kept(_constant(b, a))
    return a.each(lambda x, _: x / constant())


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
        return bilinear(torch.matmul, a.full(), b.full())
    if isinstance(a, Jet):
        if b.ndim > max(a.ndim, 2):
            raise Unsupported("a matrix product with a constant of more axes")
        right = _kept(b)
        return (a if a.ndim > 1 else a.full()).each(lambda x, _: x @ right())
    if b.ndim < 2 or a.ndim > b.ndim:
        raise Unsupported("a matrix product with a constant of more axes")
    left = _kept(a)
    return b.full().each(lambda x, _: left() @ x)


# --- linear ----------------------------------------------------------------------------------


@rule(F.linear)
def linear(a: Any, weight: Tensor, bias: Tensor | None = None) -> Jet:
    """W a on every channel, and the bias on the value alone; known parameters are recorded."""
    if not isinstance(a, Jet) or isinstance(weight, Jet) or isinstance(bias, Jet):
        raise Unsupported("a linear layer whose weight is a jet")
    if a.ndim < 2:
        a = a.full()
    if a.tape is None or a.ndim < 2 or weight.ndim != 2 or a.shape[0] != a.tape.points:
        return _affine(a, weight, bias)
    names = a.tape.names.get(id(weight)), a.tape.names.get(id(bias))
    if names[0]:
        fixed = weight.detach()
    else:
        fixed = weight
    if bias is not None and names[1]:
        shift = bias.detach()
    else:
        shift = bias
    out = _affine(a, fixed, shift)
    if any(names):
        # each point has cotangents of its own, which can be taken at these tensors
        out = out.full().each(lambda x, _: x if x.requires_grad else x.requires_grad_())
        a.tape.uses.append(Used(*names, a, out))
    return out


def _affine(a: Jet, weight: Tensor, bias: Tensor | None) -> Jet:
    w = _kept(weight)
    return a.each(lambda x, _: F.linear(x, w()), value=F.linear(a.value, weight, bias))


def aligned(a: Jet, b: Jet) -> tuple[Jet, Jet]:
    """Both with as many axes, so that derivatives do not meet features when shapes broadcast."""
    ndim = max(a.ndim, b.ndim)

    def lengthened(j: Jet) -> Jet:
        missing = [1] * (ndim - j.ndim)
        if not missing:
            return j
        return j.full().each(lambda x, n: x.reshape(*x.shape[:n], *missing, *x.shape[n:]))

    return lengthened(a), lengthened(b)


@rule(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add)
def add(a: Any, b: Any, *, alpha: float = 1) -> Jet:
    """Jets add; a constant joins the value."""
    if isinstance(a, Jet) and isinstance(b, Jet):
        one, two = aligned(a, b)  # first derivatives are held once, if both are
        return one.each(lambda x, y, _: x + alpha * y, two)
    if isinstance(a, Jet):
        value = a.value + alpha * _constant(b, a)
    else:
        a, b = b.each(lambda x, _: alpha * x), a
        value = _constant(b, a) + a.value
    jet: Jet = a
    return jet.each(lambda x, n: x.expand(*x.shape[:n], *value.shape), value=value)


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
    return a.each(lambda x, _: -x)
