"""Influence with the exact curvature by conjugate gradients, beside brute force in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import pullback as pb
from pullback._core.errors import PullbackError
from pullback.curvature import Relative
from pullback.curvature.data_gram import DataGram

from .models import CASES, Oracle, make_case


def distance(actual: Tensor, want: Tensor) -> float:
    return float((actual - want).norm() / want.norm())


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_dense_gram(name: str) -> None:
    case = make_case(name)
    curvature = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood)
    gram = DataGram(curvature, case.data)
    want = Oracle(case).gram
    v = torch.randn(len(want))
    assert distance(gram.matvec(v), want @ v) < 1e-10
    assert abs(float(gram.trace() / want.trace()) - 1) < 1e-10


#: products with the Gram of every case are checked above; of the solves, the quickest ones
QUICK = {"adapter", "conv1d", "lstm"}


@pytest.mark.parametrize("structure", ["ekfac", pytest.param("kfac", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_scores_are_brute_force(name: str, structure: str) -> None:
    case = make_case(name)
    curvature = pb.curvature.fit(
        case.model, case.data, likelihood=case.likelihood, structure=structure
    )
    queries = list(zip(case.inputs.split(4), case.targets.split(4), strict=True))
    influence = pb.curvature.exact_influence(
        curvature, queries, case.data, damping=0.02, tol=1e-13, max_iterations=1000
    )
    oracle = Oracle(case)
    gradients = oracle.gradients()
    shifted = oracle.gram + 0.02 * torch.eye(len(oracle.gram))
    want = gradients @ torch.linalg.solve(shifted, gradients.T)
    assert influence.has_converged
    assert influence.residuals.shape == (len(gradients),)
    assert float(influence.residuals.max()) < 1e-9
    assert distance(influence.scores, want) < 1e-10


def test_relative_damping_is_that_of_the_exact_structure() -> None:
    case = make_case("mlp")
    curvature = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood)
    exact = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood, structure="exact")
    influence = pb.curvature.exact_influence(
        curvature, case.data, case.data, damping=Relative(0.5), tol=1e-12, max_iterations=500
    )
    want = pb.curvature.influence(exact, case.data, case.data, damping=Relative(0.5))
    assert distance(influence.scores, want) < 1e-9


def test_ignored_positions_do_not_count() -> None:
    case = make_case("tied")
    case.targets[:, -1] = -100
    curvature = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood)
    want = Oracle(case).gram
    v = torch.randn(len(want))
    assert distance(DataGram(curvature, case.data).matvec(v), want @ v) < 1e-10


def test_the_preconditioner_saves_iterations() -> None:
    """Layers whose curvature has very different size in directions that no coordinate axis is."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    model = torch.nn.Sequential(*layers)
    mixing = torch.linalg.qr(torch.randn(8, 8)).Q
    x = (torch.randn(300, 8) * torch.logspace(-2, 0, 8)) @ mixing
    data = (x, torch.randint(0, 3, (300,)))
    likelihood = pb.likelihoods.Categorical()
    query = (x[:2], data[1][:2])
    exact = pb.curvature.fit(model, data, likelihood=likelihood, structure="exact")
    want = pb.curvature.influence(exact, query, data, damping=1e-4)
    errors = {}
    for structure in ("ekfac", "diagonal"):
        curvature = pb.curvature.fit(model, data, likelihood=likelihood, structure=structure)
        influence = pb.curvature.exact_influence(
            curvature, query, data, damping=1e-4, tol=1e-8, max_iterations=3
        )
        errors[structure] = distance(influence.scores, want)
    assert errors["ekfac"] < 0.3 * errors["diagonal"], errors


def test_a_query_that_needs_more_iterations_says_so() -> None:
    case = make_case("conv")
    curvature = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood)
    influence = pb.curvature.exact_influence(
        curvature, case.data, case.data, damping=1e-6, tol=1e-12, max_iterations=1
    )
    assert not influence.has_converged
    assert float(influence.residuals.max()) > 1e-12


def test_a_layer_without_directional_derivatives() -> None:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 4, mode="max"), torch.nn.Linear(4, 3))
    data = (torch.randint(0, 5, (6, 2)), torch.arange(6) % 3)
    curvature = pb.curvature.fit(model, data, likelihood=pb.likelihoods.Categorical())
    with pytest.raises(PullbackError, match=r"J v cannot be computed.*Use influence\(\)"):
        pb.curvature.exact_influence(curvature, data, data)


def test_other_data_are_refused() -> None:
    case = make_case("mlp")
    curvature = pb.curvature.fit(case.model, case.data, likelihood=case.likelihood)
    few = (case.inputs[:5], case.targets[:5])
    with pytest.raises(PullbackError, match="not the data of the fit"):
        pb.curvature.exact_influence(curvature, few, few)
    with pytest.raises(PullbackError, match="no queries"):
        pb.curvature.exact_influence(curvature, [], case.data)
