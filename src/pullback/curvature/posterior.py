r"""Laplace approximation: a normal posterior around trained parameters.

    p(θ|D) ≈ N(θ*, (N G + δ)⁻¹),       f(x) ~ N(z(x), J (N G + δ)⁻¹ Jᵀ)

N G is the sum of J_nᵀ M_n J_n over the data, δ the precision of a normal prior around zero, and f
the model linearized at θ*. For regression with noise variance σ² the metric is M = 1/σ², so that G
scales with 1/σ². The marginal likelihood of both,

    log p(D) ≈ log p(D|θ*) − ½ log det(1 + N G/δ) − ½ δ‖θ*‖²,

depends on G by its eigenvalues alone, so that its maximum is cheap to find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .._core.checks import require_number
from .._core.errors import PullbackError, refuse_unknown, require
from ..likelihoods import MSE, Bernoulli, Categorical, Gaussian, Likelihood
from .capture import BatchTangent
from .curvature import Curvature, CurvatureStructure
from .data import Batch, match_targets, sample_losses, to_plain_inputs
from .reader import GradientReader
from .spectra import SpectralBlock, SpectralFunction

MARGINAL_LIKELIHOOD = "marginal likelihood"


@dataclass(frozen=True)
class SearchLimits:
    """How the marginal likelihood is maximized."""

    #: powers of ten between which the first prior precisions are tried, one each
    least_exponent: int = -6
    largest_exponent: int = 8
    #: steps of L-BFGS from the best of them; it takes five to thirty
    steps: int = 200
    #: gradient by log δ and log σ², over the loss, at which it stops
    tolerance: float = 1e-10


@dataclass(frozen=True)
class PredictionLimits:
    """Sizes of a prediction."""

    #: samples that are linearized at once
    batch_samples: int = 128
    #: entries of the covectors that are pulled back at once, samples · outputs²: 512 MiB in
    #: float32; layers hold several times as much
    covector_entries: int = 2**27
    #: entries of all covariances, 4 GiB in float32
    covariance_entries: int = 2**30


PREDICTION_LIMITS = PredictionLimits()


@dataclass(frozen=True)
class Evidence:
    """The marginal likelihood as a function of the prior precision δ and the noise σ².

    Attributes:
        eigenvalues: of N·G, for the likelihood as it was fitted, in float64.
        squared_norm: ‖θ*‖².
        loss: Σ −log p(y|z), up to constants.
        outputs: entries of all outputs; 0 unless the noise is free.
        fitted_noise: σ² of the likelihood as it was fitted; 1 unless the noise is free.
    """

    eigenvalues: Tensor
    squared_norm: float
    loss: float
    outputs: float
    fitted_noise: float

    def log_likelihood(self, noise: Tensor) -> Tensor:
        """Return log p(D|θ*), with the constant of a normal density where there is noise."""
        constant = -0.5 * self.outputs * (2 * math.pi * noise).log()
        return constant - self.loss * self.fitted_noise / noise

    def log_marginal(self, precision: Tensor | float, noise: Tensor | float) -> Tensor:
        """Return log p(D), a differentiable scalar."""
        precision = self._scalar(precision)
        noise = self._scalar(noise)
        scaled = self.eigenvalues * (self.fitted_noise / (noise * precision))
        complexity = torch.log1p(scaled).sum() + precision * self.squared_norm
        return self.log_likelihood(noise) - 0.5 * complexity

    def _scalar(self, number: Tensor | float) -> Tensor:
        return torch.as_tensor(number, dtype=torch.float64, device=self.eigenvalues.device)

    def effective_parameters(self, precision: float, noise: float) -> float:
        """Return γ = Σ s/(s + δ), the number of directions that the data decide."""
        scaled = self.eigenvalues * (self.fitted_noise / noise)
        return float((scaled / (scaled + precision)).sum())

    def maximize(
        self, precision: float | None, noise: float | None, limits: SearchLimits
    ) -> tuple[float, float]:
        """Return the δ and σ² of the largest marginal likelihood; numbers that are given stay."""
        starts = [precision or 1.0]
        if precision is None:
            exponents = range(limits.least_exponent, limits.largest_exponent + 1)
            starts = [10.0**exponent for exponent in exponents]
        first_noise = noise or self.residual_variance()
        best = max(starts, key=lambda start: float(self.log_marginal(start, first_noise)))
        logs = self._scalar([math.log(best), math.log(first_noise)])  # pyright: ignore
        is_free = [precision is None, noise is None]
        if any(is_free):
            logs = self._ascend(logs, is_free, limits)
        return math.exp(float(logs[0])), math.exp(float(logs[1]))

    def _ascend(self, logs: Tensor, is_free: list[bool], limits: SearchLimits) -> Tensor:
        """Return log δ and log σ² at the maximum that L-BFGS climbs to, without those not free."""
        logs = logs.clone().requires_grad_()
        mask = torch.tensor(is_free, dtype=logs.dtype, device=logs.device)
        optimizer = torch.optim.LBFGS(
            [logs],
            max_iter=limits.steps,
            tolerance_grad=limits.tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            numbers = logs.exp()
            loss = -self.log_marginal(numbers[0], numbers[1]) / max(1.0, abs(self.loss))
            loss.backward()
            assert logs.grad is not None
            logs.grad.mul_(mask)
            return loss

        with torch.enable_grad():
            optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        return logs.detach()

    def residual_variance(self) -> float:
        """Return Σ‖y − z‖² over the number of outputs, or 1 where there is no noise."""
        if not self.outputs:
            return 1.0
        return max(2 * self.loss * self.fitted_noise / self.outputs, 1e-300)


@dataclass(frozen=True)
class Prediction:
    """The distribution of the linearized model's outputs at some inputs.

    Attributes:
        mean: z, (N, *event).
        covariance: of the outputs of each sample, (N, m, m) for m = |event|.
        likelihood: what the outputs are parameters of.
        noise: σ² of regression, else None.
    """

    mean: Tensor
    covariance: Tensor
    likelihood: Likelihood
    noise: float | None

    @property
    def variance(self) -> Tensor:
        """The variance of each output, without noise: (N, *event)."""
        return self.covariance.diagonal(dim1=1, dim2=2).reshape(self.mean.shape)

    def probabilities(
        self, draws: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return class probabilities, (N, *event), averaged over the outputs' distribution.

        By default the logits are divided by √(1 + π/8 · variance), MacKay's approximation; with
        `draws` it is the mean over so many draws of the logits.
        """
        likelihood = self._require_logits()
        if draws is None:
            return likelihood.probabilities(self._moderated_logits())
        require_number("The number of draws", draws, least=1, whole=True)
        outputs = self.sample(draws, generator)
        return torch.stack([likelihood.probabilities(z) for z in outputs]).mean(0)

    def _require_logits(self) -> Categorical | Bernoulli:
        """Return the likelihood, and refuse one whose parameters are not logits."""
        if isinstance(self.likelihood, (Categorical, Bernoulli)):
            return self.likelihood
        raise PullbackError(
            f"{type(self.likelihood).__name__} has no class probabilities",
            "the outputs are not logits",
            "Use mean, variance and noise",
        )

    def _moderated_logits(self) -> Tensor:
        """Return the logits divided by √(1 + π/8 · variance)."""
        return self.mean / (1 + math.pi / 8 * self.variance).sqrt()

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """Return draws of the outputs, without noise: (count, N, *event)."""
        values, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * values.clamp(min=0).sqrt()[:, None]
        flat = self.mean.flatten(1)
        noise = torch.randn(
            (count, *flat.shape), generator=generator, dtype=flat.dtype, device=flat.device
        )
        moves = torch.einsum("nab,snb->sna", root, noise)
        return (flat + moves).view(count, *self.mean.shape)

    def log_likelihood(self, targets: Tensor) -> Tensor:
        """Return log p(y|x, D) of each sample, added up over its outputs or positions: (N,).

        Regression: normal densities with variance + noise. Classification: `probabilities()`, where
        positions whose target is the likelihood's `ignore_index` count nothing.
        """
        if self.noise is None:
            return -sample_losses(self._require_logits(), self._moderated_logits(), targets)
        targets = match_targets(self.likelihood, self.mean, targets)
        spread = self.variance + self.noise
        densities = (targets - self.mean).square() / spread + (2 * math.pi * spread).log()
        return -0.5 * densities.flatten(1).sum(1)


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """A normal posterior with mean θ* and precision N·G + δ, made by `laplace`.

    Attributes:
        curvature: G.
        prior_precision: δ.
        noise: σ² of regression, else None.
        evidence: the marginal likelihood as a function of both.
    """

    curvature: Curvature
    prior_precision: float
    noise: float | None
    evidence: Evidence

    def __repr__(self) -> str:
        return (
            f"Posterior({self.curvature!r}, prior_precision={self.prior_precision:.4g}, "
            f"noise={self.noise})"
        )

    def __call__(self, inputs: Any) -> Prediction:
        """Return the distribution of the outputs at inputs: a tensor, a tuple or a mapping."""
        reader = GradientReader(self.curvature)
        plain_inputs = to_plain_inputs(inputs)
        samples = _count_samples(plain_inputs)
        height = PREDICTION_LIMITS.batch_samples
        start = 0
        means = []
        covariances = []
        while start < samples:
            batch = Batch(_slice_inputs(plain_inputs, samples, start, height), ())
            tangent = reader.linearize(batch)
            fitting = _choose_batch(samples, tangent.outputs[0].numel())
            if fitting < height:  # the number of outputs is known now: begin again
                height = fitting
                continue
            means.append(tangent.outputs)
            covariances.append(self._output_covariance(tangent))
            start += height
        return Prediction(
            torch.cat(means), torch.cat(covariances), self.curvature.likelihood, self.noise
        )

    def _output_covariance(self, tangent: BatchTangent) -> Tensor:
        """Return J (N·G + δ)⁻¹ Jᵀ of every sample of a batch, (n, m, m)."""
        columns = _identity_covectors(tangent.outputs)
        gradients = tangent.gradients(columns, self.curvature.forms)
        covariance = columns.new_zeros(len(tangent.outputs), len(columns), len(columns))
        for block, gradient in zip(self.curvature.blocks, gradients, strict=True):
            function = self._covariance_function(block)
            for panel in gradient.panels():
                covariance[panel] += block.inner_products(function, gradient, panel)
        return covariance

    def log_marginal_likelihood(self) -> float:
        """Return log p(D) of this prior precision and noise."""
        return float(self.evidence.log_marginal(self.prior_precision, self.noise or 1.0))

    def effective_parameters(self) -> float:
        """Return how many directions of the parameters the data decide."""
        return self.evidence.effective_parameters(self.prior_precision, self.noise or 1.0)

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return draws of the parameters by name, (count, *shape), for `functional_call`."""
        self.curvature.check_model()
        require_number("The number of draws", count, whole=True)
        space = self.curvature.space
        noise = torch.randn(
            (count, space.size), generator=generator, dtype=space.dtype, device=space.device
        )
        moves = self.curvature.apply(self._root_function, noise)
        center = space.flatten({n: p.detach() for n, p in self.curvature.parameters.items()})
        return space.split(center + moves)

    def _covariance_function(self, block: SpectralBlock) -> SpectralFunction:
        """Return s ↦ 1/(N s + δ), with the noise of regression in s."""
        scale = self.curvature.samples * self.evidence.fitted_noise / (self.noise or 1.0)

        def function(values: Tensor) -> Tensor:
            return 1 / (scale * values + self.prior_precision)

        return function

    def _root_function(self, block: SpectralBlock) -> SpectralFunction:
        covariance = self._covariance_function(block)

        def function(values: Tensor) -> Tensor:
            return covariance(values).sqrt()

        return function


def _read_precision(prior_precision: float | str) -> float | None:
    """Return δ as a number, or None where it maximizes the marginal likelihood."""
    if isinstance(prior_precision, str):
        refuse_unknown("choice of the prior precision", prior_precision, [MARGINAL_LIKELIHOOD])
        return None
    require_number("The prior precision", prior_precision, positive=True)
    return float(prior_precision)


def laplace(
    curvature: Curvature,
    *,
    prior_precision: float | str = 1.0,
    noise: float | None = None,
) -> Posterior:
    """Return a normal posterior around the model's parameters.

    Args:
        curvature: G, from `fit`; of the last layer alone with `fit(parameters="last layer")`.
        prior_precision: δ, a number, or "marginal likelihood" for the one that maximizes it.
        noise: σ² of regression (`Gaussian`, `MSE`). By default it maximizes the marginal likelihood
            where the curvature is exact. Elsewhere it is the mean squared residual: blocks without
            their coupling count too many parameters as decided, and the noise that maximizes their
            marginal likelihood is up to twice too large. Classification has none.

    Raises:
        PullbackError: if the model has changed since the fit, or a number is not usable.
    """
    require(isinstance(curvature, Curvature), "The curvature", curvature, "Pass what fit returned")
    curvature.check_model()
    chosen_precision = _read_precision(prior_precision)
    fitted_noise = _read_noise(curvature.likelihood)
    _check_noise(curvature, noise, fitted_noise)
    evidence = _make_evidence(curvature, fitted_noise)
    fixed_noise = noise
    if fitted_noise is None:
        fixed_noise = 1.0
    elif noise is None and curvature.structure is not CurvatureStructure.EXACT:
        fixed_noise = evidence.residual_variance()
    precision, best_noise = evidence.maximize(chosen_precision, fixed_noise, SearchLimits())
    posterior_noise = None
    if fitted_noise is not None:
        posterior_noise = best_noise
    return Posterior(curvature, precision, posterior_noise, evidence)


def _check_noise(curvature: Curvature, noise: float | None, fitted_noise: float | None) -> None:
    """Raise if the user's noise cannot be used, or cannot be estimated where none is given."""
    if noise is not None:
        require_number("The noise", noise, positive=True)
        if fitted_noise is None:
            raise PullbackError(
                f"{type(curvature.likelihood).__name__} has no noise",
                f"got noise={noise!r}",
                "Leave noise= out, or use the likelihood Gaussian",
            )
    elif fitted_noise is not None and not curvature.totals.loss:
        raise PullbackError(
            "The noise cannot be estimated",
            "the model meets all targets without error",
            "Give laplace(..., noise=...) a variance, or fit on other data",
        )


def _read_noise(likelihood: Likelihood) -> float | None:
    """Return σ² that a regression's likelihood stands for; None where there is none to choose."""
    if isinstance(likelihood, MSE):
        return 0.5
    if isinstance(likelihood, Gaussian) and not isinstance(likelihood.variance, str):
        return float(likelihood.variance)
    return None


def _make_evidence(curvature: Curvature, fitted_noise: float | None) -> Evidence:
    """Return what the marginal likelihood depends on beside the prior."""
    blocks = [block.eigenvalues().double() for block in curvature.blocks]
    squares = [float(p.detach().double().square().sum()) for p in curvature.parameters.values()]
    outputs = 0.0
    if fitted_noise is not None:
        outputs = curvature.totals.outputs
    return Evidence(
        eigenvalues=torch.cat(blocks) * curvature.samples,
        squared_norm=sum(squares),
        loss=curvature.totals.loss,
        outputs=outputs,
        fitted_noise=fitted_noise or 1.0,
    )


def _identity_covectors(outputs: Tensor) -> Tensor:
    """Return the coordinate covectors of every sample, (m, N, *event)."""
    size = outputs[0].numel()
    eye = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    columns = eye.view(size, 1, *outputs.shape[1:])
    return columns.expand(size, *outputs.shape)


def _choose_batch(samples: int, outputs: int) -> int:
    """Return how many samples are linearized at once; refuse covariances that are too large."""
    entries = samples * outputs**2
    if entries > PREDICTION_LIMITS.covariance_entries:
        raise PullbackError(
            "The covariances do not fit into memory",
            f"{samples} samples with {outputs} outputs each have {entries:.1e} entries",
            "Ask for fewer samples at once, or let forward return fewer outputs",
        )
    fitting = PREDICTION_LIMITS.covector_entries // outputs**2
    return max(1, min(PREDICTION_LIMITS.batch_samples, fitting))


def _count_samples(inputs: Any) -> int:
    """Return the length of the first tensor."""
    leaves = pytree.tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors or not len(tensors[0]):
        raise PullbackError("There are no inputs", "no tensor has samples", "Give some")
    return len(tensors[0])


def _slice_inputs(inputs: Any, samples: int, start: int, size: int) -> Any:
    """Return the inputs with a slice of every tensor that counts the samples."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == samples:
            return leaf[start : start + size]
        return leaf

    return pytree.tree_map(cut, inputs)
