"""Rank, properness, and how much of the model is not proper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pullback import PullbackError
from pullback.geometry import Point, properness

DTYPE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DTYPE)


def figure_eight(x: Tensor) -> Tensor:
    return torch.cat([torch.sin(2 * x), torch.sin(x)])


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rank_of_a_linear_map(rank: int, dtype: torch.dtype) -> None:
    a = (draw(6, rank) @ draw(rank, 9, seed=1)).to(dtype)
    rank_of_point = Point(lambda x: a @ x, draw(9).to(dtype)).rank
    assert rank_of_point.rank == int(rank_of_point) == rank
    assert rank_of_point.parameters - rank_of_point.rank == 9 - rank
    assert rank_of_point.spectrum.shape == (6,)
    truth = torch.linalg.svdvals(a.double())
    assert float((rank_of_point.spectrum.double() - truth).abs().max()) < 1e-5 * float(truth[0])
    assert (
        float(rank_of_point.spectrum[rank - 1])
        > rank_of_point.tolerance
        >= float(rank_of_point.spectrum[rank])
    )
    assert rank_of_point.gap > 1e3
    assert str(rank) in str(rank_of_point)


def test_rank_tolerance_is_the_users() -> None:
    a = torch.diag(tensor(1, 1e-3, 1e-6))
    assert Point(lambda x: a @ x, draw(3)).rank.rank == 3
    assert Point(lambda x: a @ x, draw(3), rcond=1e-4).rank.rank == 2
    assert Point(lambda x: a @ x, draw(3), rcond=1e-4).rank.gap == pytest.approx(1e3)


def test_rank_of_a_wide_model_is_that_of_its_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    assert Point(model, inputs=draw(7, 3)).rank.rank == 14
    twice = torch.cat([draw(7, 3), draw(7, 3)])
    assert Point(model, inputs=twice).rank.rank == 14


def cusp(x: Tensor) -> Tensor:
    return torch.cat([x**2, x**3])


PROPER = {
    "line": (lambda x: x, tensor(0), True, 1),
    "overparametrized": (lambda x: x[:1] + x[1:], tensor(2, 1), True, 1),
    "cube": (lambda x: x**3, tensor(0), False, 1),
    "cube elsewhere": (lambda x: x**3, tensor(0.1), True, 1),
    "one direction flat": (lambda x: torch.stack([x[0], x[1] ** 3]), tensor(1, 0), False, 2),
    "a product at zero": (lambda x: x[:1] * x[1:], tensor(0, 0), False, 1),
    "a product elsewhere": (lambda x: x[:1] * x[1:], tensor(0, 1), True, 1),
    "sphere, pole": (
        lambda x: torch.stack([x[0].sin() * x[1].cos(), x[0].sin() * x[1].sin(), x[0].cos()]),
        tensor(0, 1),
        False,
        2,
    ),
    "cusp": (cusp, tensor(0), False, 1),
    "figure eight, one branch": (figure_eight, tensor(0), True, 1),
}


@pytest.mark.parametrize(("phi", "xi", "proper", "dimension"), PROPER.values(), ids=PROPER)
def test_properness(
    phi: Callable[[Tensor], Tensor], xi: Tensor, proper: bool, dimension: int
) -> None:
    report = properness(phi, xi)
    assert bool(report) is report.proper is proper
    assert report.dimension == dimension
    assert not report.singular
    metric = torch.diag(torch.arange(1, phi(xi).numel() + 1).to(DTYPE))
    assert properness(phi, xi, metric).proper is proper


def test_other_parameters_show_a_crossing() -> None:
    report = properness(figure_eight, tensor(0), others=[tensor(torch.pi)])
    assert report.singular
    assert not report
    assert report.span == 2
    assert "singular" in report.reason


def test_other_parameters_show_a_larger_sheet() -> None:
    """φ(ξ) = 0 on the line x₁ = 0 of parameters, which φ sends to one point of a plane."""

    def polar(x: Tensor) -> Tensor:
        return torch.stack([x[0] * x[1], x[0] * (1 + x[1])]) * (x[0] - 1)

    report = properness(polar, tensor(0, 3), others=[tensor(1, 2)], radius=1e-3)
    assert report.dimension == 2
    assert not report.proper


def test_a_reparametrization_that_is_no_diffeomorphism_is_not_proper() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = draw(4, 2)
    assert properness(model, inputs=x)
    zero = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    assert not properness(model, zero, inputs=x)  # dead hidden units: only the bias moves
    w = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    names = {n: p.shape for n, p in model.named_parameters()}

    def psi(t: Tensor) -> Tensor:
        pieces = (w + t**3).split([s.numel() for s in names.values()])
        params = {n: v.view(s) for (n, s), v in zip(names.items(), pieces, strict=True)}
        return torch.func.functional_call(model, params, (x,))

    assert not properness(psi, torch.zeros_like(w), radius=0.1)


def test_properness_outside_the_domain() -> None:
    report = properness(lambda x: x.log(), tensor(1e-3), radius=1e-2, tries=20)
    assert 0 < report.tried < 20
    assert report.proper
    with pytest.raises(PullbackError, match="dimension could not be found"):
        properness(lambda x: torch.where(x == 1, x, torch.nan), tensor(1.0))


def test_proposition_1_non_proper_points_have_measure_zero_in_the_model() -> None:
    """Half of these parameters are not proper, and all of them stand for one point.

    By the coarea formula ∫ σ dξ over parameters is the length of their image.
    """
    draws = 2 * torch.rand(300, 1, generator=torch.Generator().manual_seed(0)).to(DTYPE) - 1
    points = [Point(lambda x: torch.relu(x) ** 3, xi) for xi in draws]
    sigma = torch.stack([p.rank.spectrum[0] for p in points])
    assert abs(float((sigma == 0).double().mean()) - 0.5) < 0.05
    for tau in (1e-1, 1e-2, 1e-3, 0.0):
        share = float(sigma[sigma <= tau * sigma.max()].sum() / sigma.sum())
        # σ = 3ξ² ≤ 3τ on ξ ≤ √τ, whose image has the length τ^(3/2) of 1
        assert abs(share - tau**1.5) < 0.3 * tau**1.5 + 1e-3


BAD = {
    "radius": (lambda: properness(lambda x: x, tensor(1), radius=0), "radius"),
    "tries": (lambda: properness(lambda x: x, tensor(1), tries=0), "tries"),
    "another point": (lambda: properness(lambda x: x, tensor(1), others=[tensor(2)]), "another"),
}


@pytest.mark.parametrize(("call", "match"), BAD.values(), ids=BAD)
def test_bad_input(call: Callable[[], object], match: str) -> None:
    with pytest.raises(PullbackError, match=match):
        call()


def test_an_image_is_orthonormal() -> None:
    a = draw(6, 3) @ draw(3, 9, seed=1)
    q = Point(lambda x: a @ x, draw(9)).image()
    assert q.shape == (6, 3)
    assert float((q.T @ q - torch.eye(3).to(q)).norm()) < 1e-12
    assert float((a - q @ (q.T @ a)).norm()) < 1e-12 * float(a.norm())
