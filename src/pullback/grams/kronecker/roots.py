r"""Polar factors, inverse square roots and eigenbases of stacked matrices.

An `eigh` of a large matrix takes longer than many training steps on a GPU. What direction rules
need costs less there: polynomials of the matrix for a polar factor and an inverse root, and a small
rotation of the last eigenbasis for the next one. Products of float32 matrices are in half precision
with float32 sums, split in two parts where that is not enough. On a CPU polynomials take less time
than an `eigh` for small float32 matrices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import factor_matrix

#: Odd polynomials ax + bx³ + cx⁵ that bring [10⁻³, 1] to 1 ± 0.13, one after the other. Each is the
#: best uniform approximation of 1 on the interval that the last one left, with 1 % of room above.
_POLYNOMIALS = (
    (8.4703, -25.1081, 18.6293),
    (4.1423, -3.0181, 0.5526),
    (3.9286, -2.8723, 0.5365),
    (3.2763, -2.4118, 0.4860),
    (2.2794, -1.6274, 0.4026),
)
#: and the limit of them, which takes [0.7, 1.3] to 1 ± 0.09
_LAST_POLYNOMIAL = (1.875, -1.25, 0.375)


@dataclass(frozen=True)
class Thresholds:
    """Bounds of the iterations."""

    #: the largest condition for which a root needs no first polynomial
    small_condition: float = 1.6e4
    #: the largest rotation of one turn, in radians: perturbation theory holds for small ones
    angle: float = 0.7
    #: round-off of EᵀCE, in units of the largest entry's
    noise: float = 8.0
    #: how far from 1 the diagonal of ZY may be before the last step of a root
    diagonal_error: float = 0.3
    #: singular values below this share of ‖X‖ do not become 1 in a polar factor
    least_singular_value: float = 1e-3
    #: from this ratio of sides on, polynomials of the Gram matrix are composed before they are
    #: applied. For sides m ≤ n it takes 8m²n + 28m³ operations instead of 20m²n + 10m³. Three in
    #: a row are as many as float16 bears: smallest singular values would be lost in T's round-off.
    long_side: float = 1.5
    #: sides of matrices for which a CPU takes products. On one core of a Xeon with AVX-512 polar
    #: factors of one matrix and of four take 0.21 and 0.22 ms of 0.17 and 0.26 by `eigh` at a side
    #: of 16, 0.30 and 0.59 of 0.52 and 1.54 at 64, 0.85 and 2.9 of 1.4 and 5.0 at 128, 2.8 and 9.7
    #: of 3.1 and 11.1 at 192, 6.8 and 27.8 of 7.6 and 21.5 at 256. Longer rows change little.
    least_product_side: int = 16
    most_product_side: int = 192
    #: rows of bases that are turned together with others: operations on larger ones take longer
    #: than their launch
    joint_turn: int = 128
    #: rows of factors whose roots are found together with others: products of larger ones fill a
    #: GPU by themselves
    joint_root: int = 1024


_THRESHOLDS = Thresholds()


class Route(Enum):
    """How polar factors, inverse roots and rotations of bases are found."""

    #: by an `eigh`, to the round-off of the dtype
    EIGH = "eigh"
    #: by polynomials of float32 matrices
    PRODUCTS = "products"
    #: by polynomials of float16 matrices, with sums in float32
    HALF_PRODUCTS = "half products"


def _choose_route(x: Tensor, *, fine: bool = False) -> Route:
    """Return the fastest route for X, (B, m, n), that is accurate enough.

    Polynomials leave singular values of 1 ± 0.13 in a polar factor and an error of 0.6 % in a root.
    Where a root is to be `fine`, a CPU takes the `eigh`, which bears any condition.
    """
    if x.dtype == torch.float64:
        return Route.EIGH
    if x.is_cuda:
        return Route.HALF_PRODUCTS
    side = min(x.shape[-2:])
    is_small = _THRESHOLDS.least_product_side <= side <= _THRESHOLDS.most_product_side
    if x.dtype == torch.float32 and is_small and not fine:
        return Route.PRODUCTS
    return Route.EIGH


def polar(x: Tensor) -> Tensor:
    r"""Return approximate polar factors UVᵀ of X = USVᵀ, (B, m, n).

    Singular values above 10⁻³‖X‖ become 1, or 1 ± 0.13 by products, smaller ones less than that. On
    a GPU products and the result are in float16. A matrix of zeros stays one.
    """
    route = _choose_route(x)
    if route is Route.HALF_PRODUCTS:
        return _half_polar(x)
    return _gram_polar(x, route)


def _half_polar(x: Tensor) -> Tensor:
    """Return polar factors by products in float16."""
    norm_dtype = x.dtype
    if x.dtype in (torch.float16, torch.bfloat16):
        norm_dtype = torch.float32
    norm = torch.linalg.matrix_norm(x, keepdim=True, dtype=norm_dtype)
    norm = (1.01 * norm).clamp(min=torch.finfo(norm_dtype).tiny ** 0.5)
    y = torch.div(x, norm, out=torch.empty_like(x, dtype=torch.float16))
    rows, columns = x.shape[-2:]
    chains = [[polynomial] for polynomial in _POLYNOMIALS]
    if max(rows, columns) >= _THRESHOLDS.long_side * min(rows, columns):
        chains = [[*_POLYNOMIALS[:2]], [*_POLYNOMIALS[2:]]]
    for polynomials in chains:
        if rows > columns:
            y = torch.bmm(y, _compose_polynomials(torch.bmm(y.mT, y), polynomials))
        else:
            y = torch.bmm(_compose_polynomials(torch.bmm(y, y.mT), polynomials), y)
    return y


def _compose_polynomials(gram: Tensor, polynomials: Sequence[tuple[float, float, float]]) -> Tensor:
    r"""Return Q = P₁P₂… for T₁ = YYᵀ, so that QY is what these odd polynomials make of Y.

        P_i = a + bT_i + cT_i²,   T_{i+1} = P_i T_i P_i.

    All of them are small where Y is long.
    """
    total: Tensor | None = None
    for i, (a, b, c) in enumerate(polynomials):
        p = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        p.diagonal(dim1=-2, dim2=-1).add_(a)
        if total is None:
            total = p
        else:
            total = torch.bmm(p, total)
        if i + 1 < len(polynomials):
            gram = torch.bmm(p, torch.bmm(gram, p))
    assert total is not None
    return total


def _gram_polar(x: Tensor, route: Route) -> Tensor:
    """Return (XXᵀ)^(-½) X, or X (XᵀX)^(-½) where that is smaller."""
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):  # `eigh` does not know them
        return _gram_polar(x.float(), route).to(dtype)
    tiny = torch.finfo(dtype).tiny ** 0.5
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=tiny)
    rows, columns = x.shape[-2:]
    if rows > columns:
        return x @ _invert_root_of_gram(x.mT @ x, route)
    return _invert_root_of_gram(x @ x.mT, route) @ x


def _invert_root_of_gram(gram: Tensor, route: Route) -> Tensor:
    """Return G^(-½) of matrices of norm 1 at most; eigenvalues below 10⁻⁶ are not amplified more.

    Polynomials are all composed: float32 loses 0.001 of singular values of 10⁻³, an `eigh` 0.02.
    """
    if route is Route.PRODUCTS:
        return _compose_polynomials(gram, _POLYNOMIALS)
    # `eigh` raises for a matrix that is not finite. A step that turns out to be void brings such
    # ones, and its flag is read later; the result is not finite either, since X is not.
    gram = torch.nan_to_num(gram, nan=0.0, posinf=0.0, neginf=0.0)
    values, vectors = torch.linalg.eigh(gram)
    roots = values.clamp(min=_THRESHOLDS.least_singular_value**2).rsqrt()
    return (vectors * roots[..., None, :]) @ vectors.mT


class RootsWithFlags(NamedTuple):
    """Inverse roots of one stack of factors, with flags that are still on the device.

    Attributes:
        roots: of G factors, (G, n, n), or (G, n) of diagonals.
        has_converged: True for each root that can be used, (G,).
    """

    roots: Tensor
    has_converged: Tensor


def inverse_root(factor: Tensor, damping: float, *, fine: bool = False) -> RootsWithFlags:
    r"""Return Z = (1 + C/c)^(-½) with c = λ tr(C)/n for symmetric C ≥ 0, and which converged.

    C are matrices (G, n, n) or diagonals (G, n). For matrices Y → A^½, Z → A^(-½) by

        T = ZY,   P = a + bT + cT²,   Y ← YP,   Z ← PZ,

    from Y = A = (C + c)/‖C + c‖ and Z = 1, with the polynomials of `polar` in the square root. On a
    GPU products keep 11 bits, or 22 of them if they are to be `fine`. On a CPU large, `fine` and
    float64 ones are by `eigh`.
    """
    tiny = torch.finfo(factor.dtype).tiny
    mean = factor_matrix.diagonal(factor).mean(-1).clamp(min=tiny)
    factor = factor / mean.view(-1, *[1] * (factor.ndim - 1))
    if factor_matrix.is_diagonal(factor):
        out = (1 + factor / damping).rsqrt()
        return RootsWithFlags(out, torch.isfinite(out).all(-1))
    route = _choose_route(factor, fine=fine)
    if route is Route.EIGH:
        return _exact_inverse_root(factor, damping)
    y = factor_matrix.add_identity(factor, torch.full_like(mean, damping), overwrite=True)
    norm = torch.linalg.matrix_norm(y, keepdim=True)
    y /= norm
    multiply = torch.bmm
    if fine:
        multiply = _fine_product
    elif route is Route.HALF_PRODUCTS and y.dtype == torch.float32:
        y = y.half()
    first, *others = _POLYNOMIALS
    if factor.shape[-1] <= _THRESHOLDS.small_condition * damping:  # a bound of the condition
        first, *others = others
    z = _evaluate_polynomial(y, first, multiply)  # the first step, from Z = 1
    y = multiply(y, z)
    for coefficients in others:
        p = _evaluate_polynomial(multiply(z, y), coefficients, multiply)
        y = multiply(y, p)
        z = multiply(p, z)
    t = multiply(z, y)
    has_converged = (factor_matrix.diagonal(t) - 1).abs().amax(-1) < _THRESHOLDS.diagonal_error
    z = multiply(_evaluate_polynomial(t, _LAST_POLYNOMIAL, multiply), z)
    return RootsWithFlags(z * (damping / norm).sqrt(), has_converged)


def inverse_roots(
    factors: Sequence[Tensor], damping: float, *, fine: bool = False
) -> list[RootsWithFlags]:
    """Return `inverse_root` of several stacks; small factors of one size are handled at once."""
    groups: dict[Any, list[int]] = {}
    for i, factor in enumerate(factors):
        form: Any = i
        if factor.shape[-1] <= _THRESHOLDS.joint_root:
            form = (factor.shape[1:], factor.dtype, factor.device)
        groups.setdefault(form, []).append(i)
    by_index: dict[int, RootsWithFlags] = {}
    for indices in groups.values():
        counts = [len(factors[i]) for i in indices]
        joint = inverse_root(torch.cat([factors[i] for i in indices]), damping, fine=fine)
        parts = zip(joint.roots.split(counts), joint.has_converged.split(counts), strict=True)
        by_index.update(zip(indices, map(RootsWithFlags._make, parts), strict=True))
    return [by_index[i] for i in range(len(factors))]


def _evaluate_polynomial(
    t: Tensor,
    coefficients: tuple[float, float, float],
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return a + bT + cT²."""
    a, b, c = coefficients
    p = multiply(t, t).mul_(c).add_(t, alpha=b)
    p.diagonal(dim1=-2, dim2=-1).add_(a)
    return p


def _exact_inverse_root(factor: Tensor, damping: float) -> RootsWithFlags:
    """Return (1 + C/λ)^(-½) by `eigh` for C with a mean eigenvalue of 1, and which are finite.

    A matrix that is not finite is replaced by zeros in the `eigh`, which would raise for it.
    """
    is_finite = torch.isfinite(factor).flatten(1).all(1)
    finite_factor = torch.where(is_finite[:, None, None], factor, torch.zeros_like(factor))
    try:
        values, vectors = torch.linalg.eigh(finite_factor)
    except torch.linalg.LinAlgError:
        no_block = torch.zeros(len(factor), dtype=torch.bool, device=factor.device)
        return RootsWithFlags(factor, no_block)
    roots = (1 + values.clamp(min=0) / damping).rsqrt()
    root = (vectors * roots[..., None, :]) @ vectors.mT
    return RootsWithFlags(root, is_finite & torch.isfinite(root).flatten(1).all(1))


def eigenbasis(factor: Tensor) -> Tensor:
    """Return the eigenvectors of C, (G, n, n); NaN where they are not found."""
    out = torch.empty_like(factor)
    for vectors, matrix in zip(out, factor, strict=True):  # not at once: each takes much memory
        try:
            vectors.copy_(torch.linalg.eigh(matrix)[1])
        except torch.linalg.LinAlgError:
            vectors.fill_(torch.nan)
    return out


@dataclass(frozen=True)
class BasisTurn:
    """A basis E' = EQ, (G, n, n), and the rotation Q = EᵀE'."""

    basis: Tensor
    rotation: Tensor


def turn_basis(factor: Tensor, basis: Tensor) -> BasisTurn:
    r"""Return an orthonormal E' in which C, (G, n, n), is closer to diagonal than in E.

    One step of first-order perturbation theory: E' = EQ with Q close to 1 + K,

        K_ij = S_ij(s_j − s_i)/((s_j − s_i)² + 4S_ij² + ε²),   S = EᵀCE,  s = diag S,

    which is S_ij/(s_j − s_i) where eigenvalues are apart and bounded where they are not. ε is the
    round-off of the largest: eigenvalues that are alike but for it do not turn. On a CPU Q is the
    Cayley transform of K; on a GPU E + EK is orthonormalized by products.
    """
    if factor.shape[-1] == 1:
        return BasisTurn(basis, torch.ones_like(basis))
    tiny = torch.finfo(factor.dtype).tiny
    largest = factor_matrix.diagonal(factor).amax(-1).clamp(min=tiny)
    s = _fine_product(basis.mT, _fine_product(factor / largest[:, None, None], basis))
    values = factor_matrix.diagonal(s)
    gap = values[..., None, :] - values[..., None]
    noise = _THRESHOLDS.noise * torch.finfo(factor.dtype).eps
    denominator = gap.square().addcmul_(s, s, value=4).add_(noise**2)
    k = s.mul_(gap).div_(denominator)
    k = (k - k.mT).div_(2)
    angle = _THRESHOLDS.angle
    k *= (angle / _estimate_norm(k).clamp(min=angle))[:, None, None]
    if _choose_route(k) is not Route.HALF_PRODUCTS:
        rotation = _cayley_transform(k)
        new_basis = basis @ rotation
        # round-off would let lengths drift by 1e-4 in 200 turns; angles do not drift
        lengths = torch.linalg.vector_norm(new_basis, dim=-2, keepdim=True)
        return BasisTurn(new_basis / lengths, rotation)
    new_basis = basis + product(basis, k)
    for _ in range(2):  # X(3 − XᵀX)/2
        cubic = product(new_basis, product(new_basis.mT, new_basis))
        new_basis = 1.5 * new_basis - 0.5 * cubic
    return BasisTurn(new_basis, product(basis.mT, new_basis))


def turn_bases(factors: Sequence[Tensor], bases: Sequence[Tensor | None]) -> list[BasisTurn | None]:
    """Return `turn_basis` of several factors; small bases of one size are turned at once.

    Bases may be in half precision, and None for a diagonal factor, which has no turn.
    """
    dense = {i: basis for i, basis in enumerate(bases) if basis is not None}
    groups: dict[Any, list[int]] = {}
    for i, basis in dense.items():
        form: Any = i
        if basis.shape[-1] <= _THRESHOLDS.joint_turn:
            form = (basis.shape[-1], basis.dtype, basis.device)
        groups.setdefault(form, []).append(i)
    turns: list[BasisTurn | None] = [None] * len(bases)
    for indices in groups.values():
        factor = torch.cat([factors[i] for i in indices])
        basis = torch.cat([dense[i] for i in indices])
        turn = turn_basis(factor, basis.to(factor.dtype))
        counts = [len(factors[i]) for i in indices]
        new_bases = turn.basis.to(basis.dtype).split(counts)
        for i, new_basis, rotation in zip(
            indices, new_bases, turn.rotation.split(counts), strict=True
        ):
            turns[i] = BasisTurn(new_basis, rotation)
    return turns


def _cayley_transform(k: Tensor) -> Tensor:
    """Return (1 − K/2)⁻¹ (1 + K/2), a rotation for antisymmetric K; NaN where K is not finite."""
    half = k / 2
    half.diagonal(dim1=-2, dim2=-1).add_(1)  # 1 + K/2, the transpose of 1 − K/2
    return torch.linalg.solve_ex(half.mT, half).result  # which, unlike `solve`, does not raise


def _estimate_norm(k: Tensor, steps: int = 6) -> Tensor:
    """Return estimates of the largest singular values of antisymmetric K, by power iteration."""
    tiny = torch.finfo(k.dtype).tiny
    norm = torch.linalg.matrix_norm(k, keepdim=True).clamp(min=tiny)
    unit = k / norm  # whose largest singular value is at least n^(-½): no iterate underflows
    v = torch.ones_like(k[:, :1])  # a row: its product with a matrix is faster than a column's
    v[..., ::2] = -0.5
    last = v
    for _ in range(steps):
        last = v
        v = torch.bmm(torch.bmm(last, unit), unit)  # −v UᵀU
    growth = _length(v) / _length(last).clamp(min=tiny)
    return (norm * growth.sqrt())[:, 0, 0]


def _length(v: Tensor) -> Tensor:
    """Return the lengths of vectors (G, 1, n), as (G, 1, 1)."""
    return torch.linalg.vector_norm(v, dim=(-2, -1), keepdim=True)


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return XY; on a GPU with 11 bits of each entry, which are at most of the order of 1."""
    if x.is_cuda and x.dtype == torch.float32:
        return torch.bmm(x.half(), y.half(), out_dtype=torch.float32)
    return torch.bmm(x, y)


def _fine_product(x: Tensor, y: Tensor) -> Tensor:
    """Return XY; on a GPU with 22 bits of each entry: high·high + high·low + low·high."""
    if not (x.is_cuda and x.dtype == torch.float32):
        return torch.bmm(x, y)
    x_high = x.half()
    x_low = (x - x_high).half()
    y_high = y.half()
    y_low = (y - y_high).half()
    out = torch.bmm(x_high, y_low, out_dtype=torch.float32)
    out += torch.bmm(x_low, y_high, out_dtype=torch.float32)
    return out.add_(torch.bmm(x_high, y_high, out_dtype=torch.float32))


# --- products in half precision on a GPU ----------------------------------------------------------

_HALF_NORM = 2.0**15  # of a matrix in float16: no rotation of it has a larger entry


def half_precision(reference: Tensor) -> torch.dtype:
    """Return the dtype for sides of norm 1: float16 (as exact as TF32) for float32 on a GPU."""
    if reference.is_cuda and reference.dtype == torch.float32:
        return torch.float16
    return reference.dtype


def rotate(
    x: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    *,
    back: bool = False,
) -> Tensor:
    """Return UᵀXW, or back U X Wᵀ, for matrices X (B, m, n).

    On a GPU products keep 11 bits of each entry.
    """
    dtype = half_precision(x)
    scale: Tensor | None = None
    y = x
    if dtype != x.dtype and (left is not None or right is not None):
        norm = torch.linalg.matrix_norm(x, keepdim=True)
        scale = norm / _HALF_NORM
        y = scale_to_half(x, norm)
    if left is not None:
        left = left.to(dtype)
        y = torch.bmm(left if back else left.mT, y)
    if right is not None:
        right = right.to(dtype)
        y = torch.bmm(y, right.mT if back else right)
    if scale is not None:
        y = y.to(x.dtype) * scale
    return y


def scale_to_half(x: Tensor, norm: Tensor) -> Tensor:
    """Return X (B, m, n) over its Frobenius norm (B, 1, 1), times 2¹⁵, in float16."""
    scale = (norm / _HALF_NORM).clamp(min=torch.finfo(x.dtype).tiny)
    return torch.div(x, scale, out=x.new_empty(x.shape, dtype=torch.float16))
