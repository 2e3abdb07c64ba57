"""Orbits keep the function; horizontal vectors are orthogonal to them; ranks add up."""

from __future__ import annotations

import copy
import sys
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pullback import PullbackError
from pullback.symmetry import Symmetry, find
from pullback.symmetry.find import SymmetryLimits
from pullback.symmetry.orbits import OrbitLimits
from pullback.testing import jacobian
from tests.symmetry.networks import (
    Of,
    basic_block,
    cross_attention,
    dense,
    fused_attention,
    mlp,
    nullity,
    randomize,
)


def normal(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def bias(model: nn.Module) -> Tensor:
    """The first layer's."""
    return next(p.data for n, p in model.named_parameters() if n == "0.bias")


CASES = {
    "mlp": (lambda: randomize(mlp([3, 4, 5, 2])), (normal(20, 3),)),
    "linear": (lambda: randomize(mlp([3, 4, 2], nn.Identity)), (normal(20, 3),)),
    "residual": (lambda: randomize(basic_block()), (normal(6, 2, 5, 5),)),
    "batch norm": (lambda: randomize(basic_block(nn.BatchNorm2d)).eval(), (normal(6, 2, 5, 5),)),
    "fused attention": (lambda: randomize(fused_attention()), (normal(3, 5, 4),)),
    "cross attention": (
        lambda: randomize(cross_attention()),
        (normal(3, 5, 4), normal(3, 6, 4, seed=2)),
    ),
    "pre-norm block": (
        lambda: randomize(
            nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True, norm_first=True)
        ),
        (normal(3, 5, 4),),
    ),
    "post-norm block": (
        lambda: randomize(nn.TransformerEncoderLayer(4, 2, 6, 0.0, batch_first=True)),
        (normal(3, 5, 4),),
    ),
}


@cache
def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Symmetry]:
    make, args = CASES[name]
    model = make()
    return model, args, find(model, args)


@pytest.mark.parametrize("name", CASES)
def test_orbits_keep_the_function(name: str) -> None:
    model, args, symmetry = built(name)
    alpha = 0.5 * normal(symmetry.dimension, seed=4)
    with torch.no_grad():
        before = model(*args)
        after = functional_call(model, symmetry.orbit(alpha), args)
        assert (after - before).norm() <= 1e-11 * before.norm()
        duplicate = copy.deepcopy(model.state_dict())
        symmetry.move_(alpha)
        assert (model(*args) - before).norm() <= 1e-11 * before.norm()
        model.load_state_dict(duplicate)


@pytest.mark.parametrize("name", CASES)
def test_generators_are_the_derivative_of_orbits(name: str) -> None:
    model, _, symmetry = built(name)
    z = symmetry.generators()
    element = normal(symmetry.dimension, seed=5)
    step = 1e-6

    def flat(t: float) -> Tensor:
        return torch.cat([w.flatten() for w in symmetry.orbit(t * element).values()])

    slope = (flat(step) - flat(-step)) / (2 * step)
    assert (slope - element @ z).norm() <= 1e-7 * slope.norm()
    # tangent, generators and pairing are one matrix
    params = {n: p.detach() for n, p in model.named_parameters()}
    sizes = [p.numel() for p in params.values()]
    v = normal(sum(sizes), seed=6)
    pieces = {n: x.view(params[n].shape) for n, x in zip(params, v.split(sizes), strict=True)}
    paired = torch.cat([a.pairing(params, pieces) for a in symmetry.actions])
    assert torch.allclose(paired, z @ v, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_horizontal_is_the_orthogonal_projection(name: str) -> None:
    _, _, symmetry = built(name)
    z = symmetry.generators()
    v = normal(z.shape[1], seed=7)
    exact = v - torch.linalg.pinv(z, rtol=1e-10) @ (z @ v)
    h = symmetry.horizontal(v)
    assert (h - exact).norm() <= 1e-9 * v.norm()
    assert (z @ h).abs().max() <= 1e-9 * v.norm() * z.norm()
    assert (symmetry.horizontal(h) - h).norm() <= 1e-10 * v.norm()
    lengths = z.norm(dim=1, keepdim=True)
    assert symmetry.rank().independent == torch.linalg.matrix_rank(z / lengths, rtol=1e-10)


def test_the_largest_components_are_solved_by_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomize(mlp([6, 9, 8, 3]))
    symmetry = find(model, normal(20, 6))
    v = normal(sum(p.numel() for p in model.parameters()))
    exact = symmetry.horizontal(v)
    monkeypatch.setattr("pullback.symmetry.orbits.LIMITS", OrbitLimits(generator_entries=0))
    assert (symmetry.horizontal(v) - exact).norm() <= 1e-10 * v.norm()


def test_rank_explains_the_nullity() -> None:
    model = randomize(mlp([3, 4, 5, 2], nn.LeakyReLU))
    x = normal(80, 3)
    ranks = find(model, x).rank()
    assert (ranks.generators, ranks.independent, ranks.nullity) == (9, 9, nullity(dense(model, x)))
    assert ranks.parameters == 53
    assert ranks.outputs == 160


def test_rank_counts_what_few_samples_and_dead_units_add() -> None:
    model = randomize(mlp([3, 4, 2]))
    few = find(model, normal(5, 3)).rank()
    assert few.nullity is not None
    assert few.nullity >= 26 - 10
    assert "outputs for 26 parameters" in few.reasons[0]
    bias(model)[0] = -100.0
    dead = find(model, normal(100, 3)).rank()
    # its 4 incoming and 2 outgoing parameters do nothing; one of these directions is the scaling
    assert dead.unexplained == 5
    assert "always on or off" in dead.reasons[0]


def test_rank_is_not_misled_by_outputs_that_hardly_move() -> None:
    """Saturated attention weights, whose derivatives are what round-off leaves of them."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    model = randomize(Of(lambda s, x: s.a(x, x, x), a=attention), 3)
    x = normal(10, 5, 4) * (3 * normal(10, 1, 1, seed=4)).exp()
    j = jacobian(torch.cat([y.flatten() for y in model(x)]), list(model.parameters()))
    lengths = j.norm(dim=1)
    assert lengths.min() < 1e-16 * lengths.max()
    ranks = find(model, x).rank()
    assert (ranks.independent, ranks.nullity, ranks.reasons) == (24, 24, ())


def test_zero_units_are_dependent_generators() -> None:
    model = randomize(mlp([3, 4, 2]))
    into, _, out, _ = (p.data for p in model.parameters())
    for w in (into, bias(model), out.T):
        w[0] = 0.0
    symmetry = find(model, normal(50, 3))
    assert symmetry.dimension == 4
    assert symmetry.rank().independent == 3
    assert torch.isfinite(symmetry.horizontal(normal(26))).all()
    assert all(torch.isfinite(w).all() for w in symmetry.orbit(1.0).values())


def test_the_report_names_everything() -> None:
    symmetry = find(randomize(mlp([3, 4, 5, 2])), normal(9, 3))
    text = str(symmetry)
    assert "scaling of 0 against 2" in text
    assert "2.weight" in text
    assert repr(symmetry) == "Symmetry(2 actions, 9 generators)"


def test_bad_vectors_are_refused() -> None:
    symmetry = find(randomize(mlp([3, 4, 2])), normal(9, 3))
    with pytest.raises(PullbackError, match="generators"):
        symmetry.orbit(torch.zeros(3))
    with pytest.raises(PullbackError, match="26 parameters"):
        symmetry.horizontal(torch.zeros(5))


def test_too_many_generators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    symmetry = find(randomize(mlp([3, 4, 2])), normal(9, 3))
    limits = SymmetryLimits(generator_entries=100)
    monkeypatch.setattr(sys.modules["pullback.symmetry.find"], "LIMITS", limits)
    with pytest.raises(PullbackError, match="4 × 26"):
        symmetry.generators()
