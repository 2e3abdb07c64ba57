"""Posteriors beside dense matrices in float64."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import pullback as pb
from pullback import PullbackError
from tests.pairs import quick_products

from .models import CASES, KINDS, Case, Oracle, TiedText, make_case

STRUCTURES = ["exact", "ekfac", "kfac", "diagonal"]
#: every kind of model, and every structure, whose draws are compared with their covariance
SAMPLED = [(name, "ekfac") for name in KINDS] + [
    ("adapter", s) for s in ("exact", "kfac", "diagonal")
]
#: the variance of the likelihoods of regressions, which is then not estimated
NOISE = {"conv": 0.5}


def fit(case: Case, structure: str, **options: object) -> pb.curvature.Curvature:
    return pb.curvature.fit(
        case.model,
        case.data,
        likelihood=case.likelihood,
        structure=structure,
        **options,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(("name", "structure"), quick_products(CASES, STRUCTURES))
def test_covariance_is_that_of_the_dense_precision(name: str, structure: str) -> None:
    case = make_case(name)
    curvature = fit(case, structure)
    posterior = pb.curvature.laplace(curvature, prior_precision=0.7)
    prediction = posterior(case.inputs)
    oracle = Oracle(case)
    scale = posterior.evidence.fitted_noise / (posterior.noise or 1.0)
    gram = curvature.matvec(torch.eye(curvature.space.size)) * scale
    precision = curvature.samples * gram + 0.7 * torch.eye(len(gram))
    solved = torch.linalg.solve(precision, oracle.jacobian.mT)
    want = oracle.jacobian @ solved
    assert (prediction.covariance - want).norm() < 1e-10 * want.norm()
    assert torch.allclose(prediction.mean, oracle.raw.view(prediction.mean.shape))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", KINDS)
def test_marginal_likelihood_is_the_formula(name: str, structure: str) -> None:
    case = make_case(name)
    curvature = fit(case, structure)
    posterior = pb.curvature.laplace(curvature, prior_precision=0.3)
    gram = curvature.matvec(torch.eye(curvature.space.size))
    oracle = Oracle(case)
    theta = curvature.space.flatten({n: p.detach() for n, p in curvature.parameters.items()})
    if posterior.noise is None:
        likelihood = -case.likelihood.nll(oracle.raw, case.targets).sum()
        scale = 1.0
    else:
        normal = torch.distributions.Normal(oracle.raw, math.sqrt(posterior.noise))
        likelihood = normal.log_prob(case.targets).sum()
        scale = 0.5 / posterior.noise
    inner = torch.eye(len(gram)) + curvature.samples * scale * gram / 0.3
    want = likelihood - 0.5 * torch.logdet(inner) - 0.15 * theta.square().sum()
    assert abs(posterior.log_marginal_likelihood() - want) < 1e-8 * abs(want)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_the_chosen_prior_maximizes_the_marginal_likelihood(name: str) -> None:
    curvature = fit(make_case(name), "exact")
    best = pb.curvature.laplace(curvature, prior_precision="marginal likelihood")
    top = best.log_marginal_likelihood()
    for factor in (0.8, 0.99, 1.01, 1.25):
        other = best.evidence.log_marginal(best.prior_precision * factor, best.noise or 1.0)
        assert other < top
        if best.noise is not None:
            assert best.evidence.log_marginal(best.prior_precision, best.noise * factor) < top
    grid = [best.evidence.log_marginal(10.0**k, best.noise or 1.0) for k in range(-6, 9)]
    assert top >= max(grid)


def test_bayesian_linear_regression_is_exact() -> None:
    """Marginal likelihood, posterior and prediction of a linear model are known in closed form."""
    torch.manual_seed(0)
    x = torch.randn(30, 3)
    y = x @ torch.randn(3, 1) + 0.3 * torch.randn(30, 1)
    delta, noise = 0.8, 0.1
    precision = x.T @ x / noise + delta * torch.eye(3)
    mean = torch.linalg.solve(precision, x.T @ y / noise)
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = mean.T.contiguous()
    curvature = pb.curvature.fit(
        model, (x, y), likelihood=pb.likelihoods.Gaussian(), structure="exact"
    )
    posterior = pb.curvature.laplace(curvature, prior_precision=delta, noise=noise)
    covariance = noise * torch.eye(30) + x @ x.T / delta
    marginal = torch.distributions.MultivariateNormal(torch.zeros(30), covariance)
    assert abs(posterior.log_marginal_likelihood() - marginal.log_prob(y[:, 0])) < 1e-9
    query = torch.randn(5, 3)
    want = (query @ torch.linalg.solve(precision, query.T)).diagonal()
    prediction = posterior(query)
    assert torch.allclose(prediction.variance[:, 0], want, rtol=1e-10)
    targets = torch.randn(5, 1)
    density = torch.distributions.Normal(query @ mean, (want[:, None] + noise).sqrt())
    log_likelihood = prediction.log_likelihood(targets)
    assert torch.allclose(log_likelihood, density.log_prob(targets)[:, 0], rtol=1e-10)
    estimated = pb.curvature.laplace(curvature, prior_precision="marginal likelihood")
    assert estimated.noise is not None
    assert 0.05 < estimated.noise < 0.2


def test_noise_of_blocks_is_the_mean_squared_residual() -> None:
    case = make_case("conv")
    residuals = (case.targets - case.model(case.inputs)).square().mean().item()
    for structure in ("ekfac", "kfac", "diagonal"):
        assert pb.curvature.laplace(fit(case, structure)).noise == pytest.approx(residuals)


def test_squared_errors_and_gaussians_are_one_posterior() -> None:
    case = make_case("conv")
    first = pb.curvature.laplace(fit(case, "ekfac"), prior_precision="marginal likelihood")
    case.likelihood = pb.likelihoods.MSE()
    second = pb.curvature.laplace(fit(case, "ekfac"), prior_precision="marginal likelihood")
    assert second.noise == pytest.approx(first.noise, rel=1e-6)
    assert second.prior_precision == pytest.approx(first.prior_precision, rel=1e-6)
    one = first(case.inputs).covariance
    assert torch.allclose(one, second(case.inputs).covariance, rtol=1e-6)


@pytest.mark.parametrize(("name", "structure"), SAMPLED)
def test_moments_of_samples(name: str, structure: str) -> None:
    case = make_case(name)
    curvature = fit(case, structure)
    posterior = pb.curvature.laplace(curvature, prior_precision=2.0, noise=NOISE.get(name))
    draws = posterior.sample(20_000, torch.Generator().manual_seed(1))
    flat = torch.cat([draws[name].flatten(1) for name in curvature.space.names], 1)
    center = curvature.space.flatten({n: p.detach() for n, p in curvature.parameters.items()})
    gram = curvature.matvec(torch.eye(curvature.space.size))
    want = torch.linalg.inv(curvature.samples * gram + 2.0 * torch.eye(len(gram)))
    covariance = (flat - center).T @ (flat - center) / len(flat)
    deviation = (want.diagonal()[:, None] * want.diagonal() + want.square()) / len(flat)
    assert ((covariance - want).abs() / deviation.sqrt()).max() < 6
    spread = (want.diagonal() / len(flat)).sqrt()
    assert ((flat.mean(0) - center).abs() / spread).max() < 6


def test_draws_of_the_linearized_model_agree_with_its_covariance() -> None:
    case = make_case("mlp")
    prediction = pb.curvature.laplace(fit(case, "ekfac"))(case.inputs)
    draws = prediction.sample(20_000, torch.Generator().manual_seed(0)) - prediction.mean
    covariance = torch.einsum("sna,snb->nab", draws, draws) / len(draws)
    assert (covariance - prediction.covariance).abs().max() < 0.06 * prediction.covariance.max()
    close = prediction.probabilities(20_000, torch.Generator().manual_seed(0))
    probit = prediction.probabilities()
    assert torch.allclose(close.sum(1), torch.ones(len(close)))
    assert (close - probit).abs().max() < 0.06
    certain = torch.softmax(prediction.mean, 1).amax(1)
    assert bool((probit.amax(1) <= certain).all())


def test_samples_of_parameters_run_the_model() -> None:
    case = make_case("norms")
    posterior = pb.curvature.laplace(fit(case, "ekfac"), prior_precision=1e8)
    draw = {name: values[0] for name, values in posterior.sample(1).items()}
    moved = functional_call(case.model, draw, case.arguments)
    assert (moved - case.model(*case.arguments)).abs().max() < 0.01


def test_bernoulli_probabilities_and_likelihood() -> None:
    case = make_case("lstm")
    prediction = pb.curvature.laplace(fit(case, "ekfac"))(case.inputs)
    p = prediction.probabilities()
    want = (case.targets * p.log() + (1 - case.targets) * (1 - p).log()).sum(1)
    assert torch.allclose(prediction.log_likelihood(case.targets), want)


@pytest.mark.parametrize("dim", [1, None])
def test_classes_on_the_first_axis_of_an_event(dim: int | None, tmp_path: Path) -> None:
    """Logits (N, classes, positions), as torch's losses have them; some targets are ignored."""

    class Transposed(TiedText):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).mT

    torch.manual_seed(0)
    tokens = torch.randint(0, 5, (7, 3))
    targets = tokens.roll(1, 1)
    targets[0, 1] = -100
    likelihood = pb.likelihoods.Categorical(dim=dim)
    model = Transposed(5, 4)
    curvature = pb.curvature.fit(model, (tokens, targets), likelihood=likelihood)
    prediction = pb.curvature.laplace(curvature)(tokens)
    p = prediction.probabilities()
    assert torch.allclose(p.sum(1), torch.ones(7, 3))
    logs = p.log().gather(1, targets.clamp(min=0)[:, None])[:, 0]
    want = torch.where(targets >= 0, logs, 0).sum(1)
    assert torch.allclose(prediction.log_likelihood(targets), want)
    curvature.save(tmp_path / "saved")
    loaded = pb.curvature.load(tmp_path / "saved", torch.compile(model, backend="eager"))
    assert torch.equal(pb.curvature.laplace(loaded)(tokens).probabilities(), p)


def test_targets_without_the_last_axis() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))
    x = torch.randn(9, 2)
    y = torch.randn(9)
    curvature = pb.curvature.fit(model, (x, y), likelihood=pb.likelihoods.Gaussian())
    residuals = (y - model(x)).square().sum().item()
    assert curvature.totals.loss == pytest.approx(0.5 * residuals)
    posterior = pb.curvature.laplace(curvature)
    assert posterior(x).log_likelihood(y).shape == (9,)


@pytest.mark.parametrize("precision", [0.0, -1.0, math.nan, "evidence"])
def test_priors_that_are_refused(precision: float | str) -> None:
    curvature = fit(make_case("mlp"), "ekfac")
    with pytest.raises(PullbackError):
        pb.curvature.laplace(curvature, prior_precision=precision)


def test_noise_of_a_classification_is_refused() -> None:
    with pytest.raises(PullbackError, match="has no noise"):
        pb.curvature.laplace(fit(make_case("mlp"), "ekfac"), noise=0.1)


def test_a_model_that_changed_since_the_fit() -> None:
    case = make_case("mlp")
    curvature = fit(case, "ekfac")
    posterior = pb.curvature.laplace(curvature)
    case.model[0].bias.data += 1e-4
    with pytest.raises(PullbackError, match="changed since"):
        posterior(case.inputs)
    with pytest.raises(PullbackError, match="changed since"):
        pb.curvature.laplace(curvature)
    with pytest.raises(PullbackError, match="changed since"):
        posterior.sample(1)


def test_regression_has_no_probabilities() -> None:
    case = make_case("conv")
    prediction = pb.curvature.laplace(fit(case, "ekfac"))(case.inputs)
    with pytest.raises(PullbackError, match="no class probabilities"):
        prediction.probabilities()


@pytest.mark.parametrize("inputs", [torch.zeros(0, 2), 3])
def test_inputs_without_samples_are_refused(inputs: object) -> None:
    posterior = pb.curvature.laplace(fit(make_case("mlp"), "ekfac"))
    with pytest.raises(PullbackError, match="no inputs"):
        posterior(inputs)
