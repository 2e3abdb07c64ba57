"""Laws that relate a likelihood's factor, its `nll` and its draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..likelihoods import Likelihood
from ..metrics import Fisher
from .laws import check_metric


@dataclass(frozen=True)
class StatisticalLimits:
    """When a mean over draws is too far from what is expected."""

    #: standard errors: the largest of ten thousand normal numbers is above 6 once in 50,000 times
    standard_errors: float = 6.0
    #: units of round-off, for values that all draws share
    round_off: float = 1000.0
    #: directions in which second moments are compared
    directions: int = 4


_LIMITS = StatisticalLimits()


def check_likelihood(
    likelihood: Likelihood, z: Tensor, *, draws: int = 10_000, is_smooth: bool = True
) -> None:
    """Check a likelihood at parameters z, (N, *event): its factor, its loss and its draws.

    The factor keeps the laws of `check_metric`; `nll` has one value for each of `samples(z)`;
    `score` has the shape and dtype of z; and draws follow the generator. For y drawn by `sample`,
    means over many draws show, up to six standard errors:

        E[∇nll] = 0,    E[∇nll ∇nllᵀ] = S Sᵀ,    E[∇²nll] = S Sᵀ,

    and the first two again for `score`, where it is overridden.

    Args:
        likelihood: what to check.
        z: parameters of moderate size: an outcome that hardly occurs in the draws is not seen.
        draws: of each sample.
        is_smooth: whether `nll` has second derivatives everywhere; else the last law is left out.

    >>> from pullback.likelihoods import Bernoulli
    >>> check_likelihood(Bernoulli(), torch.randn(4, 3))
    """
    z = z.detach()
    check_metric(Fisher(likelihood), z)
    _check_generator(likelihood, z)
    _check_score_type(likelihood, z)
    repeated = z.repeat(draws, *[1] * (z.ndim - 1))
    generator = _make_generator(z)
    leaf = repeated.requires_grad_()
    y = likelihood.sample(leaf.detach(), generator)
    nll = likelihood.nll(leaf, y)
    _check_count(likelihood, z, nll, draws)
    (gradient,) = torch.autograd.grad(nll.sum(), leaf, create_graph=is_smooth)
    _check_scores(likelihood, z, gradient.detach(), "∇nll(z, y)")
    if is_smooth:
        _check_hessian(likelihood, z, gradient, leaf)
    if type(likelihood).score is not Likelihood.score:
        _check_scores(likelihood, z, likelihood.score(leaf.detach(), generator), "score(z)")


def _make_generator(z: Tensor) -> torch.Generator:
    return torch.Generator(z.device).manual_seed(0)


def _check_generator(likelihood: Likelihood, z: Tensor) -> None:
    """Check that equal generators give equal draws."""
    methods: dict[str, Callable[..., Tensor]] = {
        "sample": likelihood.sample,
        "score": likelihood.score,
    }
    for name, draw in methods.items():
        one = draw(z, _make_generator(z))
        if not torch.equal(one, draw(z, _make_generator(z))):
            raise AssertionError(f"{name} draws from the generator: two equal ones differ")


def _check_score_type(likelihood: Likelihood, z: Tensor) -> None:
    score = likelihood.score(z, _make_generator(z))
    if score.shape != z.shape or score.dtype != z.dtype:
        raise AssertionError(
            f"score(z) has the shape and dtype of z: got {tuple(score.shape)} in {score.dtype} for "
            f"{tuple(z.shape)} in {z.dtype}"
        )


def _check_count(likelihood: Likelihood, z: Tensor, nll: Tensor, draws: int) -> None:
    expected = draws * likelihood.samples(z)
    if nll.numel() != expected:
        raise AssertionError(
            f"nll(z, y) has a value for each of samples(z): got {nll.numel()} for {expected}"
        )


def _check_scores(likelihood: Likelihood, z: Tensor, scores: Tensor, name: str) -> None:
    """Check that scores of repeated samples have mean zero and the second moment S Sᵀ."""
    _check_mean(scores.view(-1, *z.shape), torch.zeros_like(z), f"E[{name}] = 0")
    for direction, expected in _list_quadratic_forms(likelihood, z):
        products = _multiply_samples(direction, scores.view(-1, *z.shape))
        _check_mean(products.square(), expected, f"E[{name} {name}ᵀ] = S Sᵀ, along a direction")


def _check_hessian(likelihood: Likelihood, z: Tensor, gradient: Tensor, leaf: Tensor) -> None:
    """Check that second derivatives of `nll` have the mean S Sᵀ."""
    for direction, expected in _list_quadratic_forms(likelihood, z):
        slope = (gradient.view(-1, *z.shape) * direction).sum()
        (product,) = torch.autograd.grad(slope, leaf, retain_graph=True, allow_unused=True)
        if product is None:
            product = torch.zeros_like(leaf)
        curvature = _multiply_samples(direction, product.view(-1, *z.shape))
        _check_mean(curvature, expected, "E[∇²nll] = S Sᵀ, along a direction")


def _list_quadratic_forms(likelihood: Likelihood, z: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return directions v, and ⟨v, S Sᵀ v⟩ of every sample, (N,)."""
    generator = torch.Generator().manual_seed(1)
    factor = likelihood.factor(z)
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(_LIMITS.directions):
        direction = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z)
        pairs.append((direction, _multiply_samples(direction, factor.matvec(direction))))
    return pairs


def _multiply_samples(direction: Tensor, values: Tensor) -> Tensor:
    """Return the inner products of every sample: (..., N) of (..., N, *event)."""
    products = direction * values
    sample_shape = products.shape[: products.ndim - direction.ndim + 1]
    return products.reshape(*sample_shape, -1).sum(-1)


def _check_mean(values: Tensor, expected: Tensor, law: str) -> None:
    """Check that the mean of values over draws is as expected, up to its standard error."""
    epsilon = torch.finfo(values.dtype).eps
    values = values.detach().double().flatten(1)
    expected = expected.detach().double().flatten()
    mean = values.mean(0)
    standard_error = values.std(0) / len(values) ** 0.5
    # numbers that are the same in all draws have an error of round-off alone
    round_off = _LIMITS.round_off * epsilon * values.abs().mean(0)
    excess = (mean - expected).abs() - _LIMITS.standard_errors * standard_error - round_off
    if bool((excess <= 0).all()):
        return
    worst = int(excess.nan_to_num(torch.inf).argmax())
    raise AssertionError(
        f"{law}: got {mean[worst]:.4g} ± {standard_error[worst]:.1g} from {len(values)} draws, "
        f"expected {expected[worst]:.4g}"
    )
