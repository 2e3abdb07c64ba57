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

from .jet import RULES, Cell, Jet, Unsupported, Used, rule
from .towers import TOWERS, Tower

_SMALL = 2**12  # entries of a constant that is copied rather than watched


def prod(factors: Sequence[Tensor]) -> Tensor:
    """Their product."""
    return reduce(operator.mul, factors)


def _shifted(dim: int, front: int) -> int:
    """An axis where `front` more axes lie in front."""
    return dim if dim < 0 else dim + front


# --- chain rule ------------------------------------------------------------------------------


def elementwise(build: Tower, a: Jet, **options: Any) -> Jet:
    """f∘a: value f, first derivatives f'·∂a, the higher by Faà di Bruno."""
    scheme = a.scheme
    f = build(a.value, scheme.order, **options)

    def summed(terms: list[tuple[int, tuple[int, ...]]]) -> Tensor:
        shares = [_times(n, prod([f[len(c)], *map(a.channel, c)])) for n, c in terms]
        return sum(shares[1:], shares[0])

    def laplacian() -> Tensor:
        squares = a.first[scheme.collapsed].square().sum(0)
        return f[1] * a.higher[-1] + f[2] * squares

    higher: list[Cell] = [partial(summed, terms) for terms in scheme.chain]
    if scheme.laplacian:
        higher.append(laplacian)
    return a.like(f[0], lambda: f[1] * a.first if scheme.order else a.first, higher)


def _times(count: int, x: Tensor) -> Tensor:
    return x if count == 1 else count * x


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
    scheme, x, y = a.scheme, a.channel, b.channel

    def summed(terms: list[tuple[int, int, int]]) -> Tensor:
        shares = [_times(n, op(x(i), y(j))) for n, i, j in terms]
        return sum(shares[1:], shares[0])

    def laplacian() -> Tensor:
        mixed = op(a.first[scheme.collapsed], b.first[scheme.collapsed]).sum(0)
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
    names = a.tape.name(weight), a.tape.name(bias)
    fixed = weight.detach() if names[0] else weight
    shift = bias.detach() if bias is not None and names[1] else bias
    out = _affine(a, fixed, shift)
    if any(names):
        out = out.full().each(_edge)  # each point has cotangents of its own
        a.tape.uses.append(Used(*names, a, out))
    return out


def _edge(x: Tensor, front: int) -> Tensor:
    """A place of the graph where cotangents can be taken."""
    return x if x.requires_grad else x.requires_grad_()


def _affine(a: Jet, weight: Tensor, bias: Tensor | None) -> Jet:
    w = _kept(weight)
    higher = [lambda i=i: F.linear(a.higher[i], w()) for i in range(len(a.higher))]
    return a.like(F.linear(a.value, weight, bias), lambda: F.linear(a.first, w()), higher)


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
        one, two = aligned(a, b)
        count = range(len(one.higher))
        higher = [lambda i=i: one.higher[i] + alpha * two.higher[i] for i in count]
        # first derivatives are held once, if both are
        first = lambda: one.first + alpha * two.first  # noqa: E731
        return one.like(one.value + alpha * two.value, first, higher)
    if isinstance(a, Jet):
        value = a.value + alpha * _constant(b, a)
    else:
        a, b = b.each(lambda x, _: alpha * x), a
        value = _constant(b, a) + a.value
    jet: Jet = a
    grown = jet.each(lambda x, n: x.expand(*x.shape[:n], *value.shape))
    higher = [lambda i=i: grown.higher[i] for i in range(len(grown.higher))]
    return jet.like(value, lambda: grown.first, higher)


@rule(torch.sub, torch.subtract, Tensor.sub, Tensor.__sub__)
def subtract(a: Any, b: Any, *, alpha: float = 1) -> Jet:
    """a − alpha·b."""
    return add(a, b, alpha=-alpha)


@rule(torch.neg, Tensor.neg, torch.negative)
def negative(a: Jet) -> Jet:
    """−a."""
    return -a


def _joined(op: Any, items: Sequence[Any], dim: int) -> Jet:
    jet = next(i for i in items if isinstance(i, Jet))

    def constant(x: Tensor) -> Jet:
        zero = torch.zeros_like(x)
        count = jet.scheme.first.stop - 1
        return jet.like(x, zero.expand(count, *x.shape), [zero] * len(jet.higher))

    jets = [i.full() if isinstance(i, Jet) else constant(i) for i in items]

    def higher(i: int) -> Tensor:
        return op([j.higher[i] for j in jets], dim=dim)

    return jet.like(
        op([j.value for j in jets], dim=dim),
        lambda: op([j.first for j in jets], dim=_shifted(dim, 1)),
        [partial(higher, i) for i in range(len(jet.higher))],
    )


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(items: Sequence[Any], dim: int = 0) -> Jet:
    """Constants among the items have no derivatives."""
    return _joined(torch.cat, items, dim)


@rule(torch.stack)
def stack(items: Sequence[Any], dim: int = 0) -> Jet:
    """As `cat`, along a new axis."""
    return _joined(torch.stack, items, dim)


def _per_channel(op: Any, axes: int) -> Any:
    """A linear operation whose first `axes` arguments after the tensor are axes."""

    def act(a: Any, *args: Any, **kwargs: Any) -> Jet:
        if not isinstance(a, Jet):
            raise Unsupported(op.__name__)

        def one(x: Tensor, front: int) -> Tensor:
            moved = [_shifted(v, front) if i < axes else v for i, v in enumerate(args)]
            named = {k: _shifted(v, front) if k.startswith("dim") else v for k, v in kwargs.items()}
            return op(x, *moved, **named)

        return a.full().each(one)

    return act


for _name, _axes in {"transpose": 2, "unsqueeze": 1}.items():
    for _home in (torch, Tensor):
        RULES[getattr(_home, _name)] = _per_channel(getattr(torch, _name), _axes)


@rule(torch.squeeze, Tensor.squeeze)
def squeeze(a: Jet, *dim: Any, **named: Any) -> Jet:
    """Per channel, in the shape that the value gets."""
    shape = a.value.squeeze(*dim, **named).shape
    return a.full().each(lambda x, n: x.reshape(*x.shape[:n], *shape))


@rule(torch.flatten, Tensor.flatten)
def flatten(a: Jet, start_dim: int = 0, end_dim: int = -1) -> Jet:
    """Per channel."""
    return a.full().each(lambda x, n: x.flatten(_shifted(start_dim, n), _shifted(end_dim, n)))


@rule(torch.reshape, Tensor.reshape, Tensor.view)
def reshape(a: Jet, *shape: Any) -> Jet:
    """Per channel."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    sizes = a.value.reshape(*sizes).shape  # −1 is ambiguous where there are no derivatives
    return a.full().each(lambda x, n: x.reshape(*x.shape[:n], *sizes))


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


def _over(op: str, a: Jet, dim: Any, keepdim: bool) -> Jet:
    axes = range(a.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    if any(axis % a.ndim == 0 for axis in axes):
        raise Unsupported(f"{op} over the points")
    return a.each(
        lambda x, n: getattr(x, op)([_shifted(axis, n) for axis in axes], keepdim=keepdim)
    )


@rule(torch.sum, Tensor.sum)
def total(a: Jet, dim: Any = None, keepdim: bool = False) -> Jet:
    """Sums over features."""
    return _over("sum", a, dim, keepdim)


@rule(torch.mean, Tensor.mean)
def mean(a: Jet, dim: Any = None, keepdim: bool = False) -> Jet:
    """Means over features."""
    return _over("mean", a, dim, keepdim)


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


def _constant_like(make: Any) -> Any:
    return lambda a, *args, **kwargs: make(a.value.detach(), *args, **kwargs)


for _make in (torch.zeros_like, torch.ones_like, torch.full_like):
    RULES[_make] = _constant_like(_make)
