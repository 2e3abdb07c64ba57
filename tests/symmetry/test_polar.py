"""Tangent kernels of polar coordinates against the basis, and the basis against autograd."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from pullback.symmetry import EqualNorm
from pullback.symmetry.descent.directions import find_direction, polar_direction

from .chain import mlp, scalings


def polar_basis(w: Tensor) -> Tensor:
    """The tangents ∂_{ψ^l} = (w_1, …, w_l)·w_{l+1}/a_l − a_l e_{l+1}, (n − 1, n)."""
    n = w.numel()
    a = w.square().cumsum(0)[:-1].sqrt()
    basis = ((w[1:] / a)[:, None] * w).tril()[:, :n]
    basis[range(n - 1), range(1, n)] = -a
    return basis


def polar_tangential(w: Tensor, g: Tensor) -> Tensor:
    """Σ_l ⟨g, ∂_{ψ^l}⟩ ∂_{ψ^l}: the direction of one layer without its radial part."""
    radial = torch.where(w.norm() > 0, (w @ g) / (w @ w), 0.0)
    return polar_direction(w, g, [len(w)]) - radial * w


def embed(coordinates: Tensor) -> Tensor:
    """W of (r, ψ^1, …, ψ^{n−1}): w^n = r cos ψ^{n−1}, …, w^1 = r Π sin ψ^s."""
    r = coordinates[0]
    psi = coordinates[1:]
    w = []
    others = r
    for angle in psi.flip(0):
        w.append(others * angle.cos())
        others = others * angle.sin()
    return torch.stack([*w, others]).flip(0)


def test_the_basis_is_that_of_the_coordinates() -> None:
    torch.manual_seed(0)
    coordinates = torch.cat([torch.rand(1) + 1, torch.rand(5) * 2 + 0.3]).double()
    jacobian = jacrev(embed)(coordinates)
    basis = polar_basis(embed(coordinates))
    for vector, true in zip(basis, jacobian.mT[1:], strict=True):
        sign = torch.sign((vector * true).sum())  # which cancels in the kernel
        assert torch.allclose(vector, sign * true, atol=1e-14)
    lengths = embed(coordinates).square().cumsum(0).sqrt()[1:]
    assert torch.allclose(basis.norm(dim=1), lengths)


def test_the_tiny_example() -> None:
    w = torch.tensor([1.0, 2, 2]).double()
    g = torch.tensor([1.0, 0, -1]).double()
    expected = torch.tensor([[2, -1, 0], [0.894427191, 1.788854382, -2.236067977]]).double()
    assert torch.allclose(polar_basis(w), expected, atol=1e-8)
    assert torch.allclose(polar_tangential(w, g), torch.tensor([6.8, 3.6, -7]).double())
    unit = polar_basis(w) / polar_basis(w).norm(dim=1, keepdim=True)
    assert torch.allclose(unit.mT @ (unit @ g), torch.tensor([10.0, 2, -7]).double() / 9)


@pytest.mark.parametrize("n", [1, 2, 3, 17, 200])
def test_the_fast_algorithm_is_the_dense_one(n: int) -> None:
    torch.manual_seed(n)
    w = torch.randn(n).double()
    g = torch.randn(n).double()
    if n > 1:
        basis = polar_basis(w)
    else:
        basis = torch.zeros(0, 1).double()
    dense = basis.mT @ (basis @ g)
    assert torch.allclose(polar_tangential(w, g), dense, atol=1e-12 * max(1, n))


def test_leading_zeros_and_zero_vectors_are_finite() -> None:
    w = torch.tensor([0.0, 0.0, 1.0, -2.0]).double()
    assert bool(polar_tangential(w, torch.ones(4).double()).isfinite().all())
    assert polar_tangential(torch.zeros(4), torch.ones(4)).tolist() == [0] * 4


def layers() -> tuple[list[Tensor], list[Tensor]]:
    """Three layers of norm 1.7 and a gradient."""
    torch.manual_seed(1)
    ws = [torch.randn(n).double() for n in (4, 6, 3)]
    return [1.7 * w / w.norm() for w in ws], [torch.randn(n).double() for n in (4, 6, 3)]


def tangents(ws: list[Tensor], unit: bool) -> Tensor:
    """∂_ψ of all layers as rows (n − ℓ, n)."""
    bases = [polar_basis(w) for w in ws]
    rows = torch.block_diag(*bases)
    if unit:
        return rows / rows.norm(dim=1, keepdim=True)
    return rows


@pytest.mark.parametrize("variant", ["riemannian", "gtk-orthonormal", "gtk-polar"])
def test_each_direction_is_the_kernel_of_its_basis(variant: str) -> None:
    ws, gs = layers()
    r = torch.cat([w / w.norm() for w in ws])
    if variant == "riemannian":
        radial = r / 3**0.5
    else:
        radial = r
    basis = torch.cat([radial[None], tangents(ws, unit=variant != "gtk-polar")])
    expected = basis.mT @ (basis @ torch.cat(gs))
    blocks = [(str(i),) for i in range(3)]
    params = {str(i): w for i, w in enumerate(ws)}
    gradients = {str(i): g for i, g in enumerate(gs)}
    direction = find_direction(variant, [blocks], params, gradients)
    assert torch.allclose(torch.cat(list(direction.values())), expected, atol=1e-13)


def test_approach_two_as_computed_is_one_with_a_longer_radius_and_not_the_stated_kernel() -> None:
    ws, gs = layers()
    blocks = [(str(i),) for i in range(3)]
    params = {str(i): w for i, w in enumerate(ws)}
    gradients = {str(i): g for i, g in enumerate(gs)}
    one, two, polar = (
        torch.cat(list(find_direction(k, [blocks], params, gradients).values()))
        for k in ("riemannian", "gtk-orthonormal", "gtk-polar")
    )
    r = torch.cat([w / w.norm() for w in ws])
    rho = sum((w @ g) / w.norm() for w, g in zip(ws, gs, strict=True))
    assert torch.allclose(two, one + (1 - 1 / 3) * rho * r, atol=1e-14)
    assert float((two - polar).norm() / polar.norm()) > 0.3


def test_a_layer_may_be_several_parameters_and_zero() -> None:
    params = {"a": torch.randn(2, 3).double(), "b": torch.randn(2).double(), "c": torch.zeros(3)}
    params["c"] = params["c"].double()
    gradients = {n: torch.randn_like(p) for n, p in params.items()}
    joined = {"ab": torch.cat([params["a"].flatten(), params["b"]]), "c": params["c"]}
    other = {"ab": torch.cat([gradients["a"].flatten(), gradients["b"]]), "c": gradients["c"]}
    for variant in ("riemannian", "gtk-orthonormal", "gtk-polar"):
        split = find_direction(variant, [[("a", "b"), ("c",)]], params, gradients)
        whole = find_direction(variant, [[("ab",), ("c",)]], joined, other)
        assert torch.allclose(torch.cat([split["a"].flatten(), split["b"]]), whole["ab"])
        assert bool(split["c"].isfinite().all())


@pytest.mark.parametrize("bias", [True, False])
def test_the_tangents_of_the_slice_and_their_metric(bias: bool) -> None:
    """r = Σ_k ŵ_k and the ∂_ψ of each layer span T_wS, with h = diag(ℓ, w_1² + … + w_{l+1}²)."""
    model = mlp(2, 3, 2, 2, bias=bias)
    slice_ = EqualNorm(scalings(model), model)
    slice_.retract_()
    names = list(chain.from_iterable(slice_.blocks))
    layers = [torch.cat([slice_.params[n].detach().flatten() for n in ns]) for ns in slice_.blocks]
    radial = torch.cat([w / w.norm() for w in layers])
    rows = torch.cat([radial[None], torch.block_diag(*(polar_basis(w) for w in layers))])
    h = torch.cat([torch.tensor([3.0]).double(), *(w.square().cumsum(0)[1:] for w in layers)])
    assert torch.allclose(rows @ rows.mT, h.diag(), atol=1e-13)
    for row in rows:
        pieces = row.split([slice_.params[n].numel() for n in names])
        v = {n: x.view(slice_.params[n].shape) for n, x in zip(names, pieces, strict=True)}
        moved = slice_.project(v)
        assert all(torch.allclose(moved[n], v[n], atol=1e-12) for n in names)
    assert len(rows) == sum(w.numel() for w in layers) - 2
