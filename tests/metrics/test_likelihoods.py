"""Likelihoods: the factor is the Fisher information of `nll` and `sample`, at any logits."""

from __future__ import annotations

from math import exp, lgamma, log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pullback as pb
from pullback.likelihoods import (
    MSE,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    Poisson,
)
from pullback.metrics import Diagonal, Factor, Fisher
from pullback.testing import assert_close, check_factor, check_likelihood, check_metric

LIKELIHOODS: dict[str, Likelihood] = {
    "Categorical": Categorical(),
    "Bernoulli": Bernoulli(),
    "Gaussian": Gaussian(variance=0.3),
    "Gaussian learned": Gaussian(variance="learned"),
    "MSE": MSE(),
    "Poisson": Poisson(),
}


def logits(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def matrix(likelihood: Likelihood, z: Tensor) -> Tensor:
    """M of a single sample, column by column."""
    factor = likelihood.factor(z[None])
    columns = [factor.matvec(e.view(1, *z.shape)).flatten() for e in torch.eye(z.numel()).to(z)]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factor_laws(likelihood: Likelihood, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_metric(Fisher(likelihood), logits(*shape).to(dtype))


# --- the laws of a likelihood, for parts of others ---------------------------------------------

CHECKED: dict[str, tuple[Likelihood, tuple[int, ...]]] = {
    **{name: (likelihood, (3, 4)) for name, likelihood in LIKELIHOODS.items()},
    "Categorical on axis 1": (Categorical(dim=1), (2, 3, 4)),
    "Bernoulli with an event": (Bernoulli(event=1), (3, 4)),
    "Poisson without an event axis": (Poisson(), (6,)),
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_laws_of_likelihoods(name: str, dtype: torch.dtype) -> None:
    likelihood, shape = CHECKED[name]
    check_likelihood(likelihood, logits(*shape).to(dtype))


class LongMetric(Poisson):
    def factor(self, z: Tensor) -> Factor:
        return Diagonal(1.1 * (z / 2).exp())


class OtherDraws(Gaussian):
    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return 1.1 * super().sample(z, generator) - 0.1 * z


class BiasedLoss(Bernoulli):
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return super().nll(z, y) + 0.1 * z


class DoubledLoss(Poisson):
    """Twice −log p with its moment of scores, as from draws at another temperature."""

    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * super().nll(z, y)

    def factor(self, z: Tensor) -> Factor:
        return Diagonal(2 * (z / 2).exp())


class OtherScore(Bernoulli):
    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return -0.9 * super().score(z, generator)


class ScoreOfOneSign(Gaussian):
    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return super().score(z, generator).abs()


class SummedLoss(Gaussian):
    def nll(self, z: Tensor, y: Tensor) -> Tensor:
        return super().nll(z, y).sum()


class GlobalDraws(MSE):
    def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return z + 0.5**0.5 * torch.randn_like(z)


class LongScore(Gaussian):
    def score(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return super().score(z, generator).double()


@pytest.mark.parametrize(
    ("likelihood", "law"),
    [
        (LongMetric(), r"E\[∇nll\(z, y\) ∇nll\(z, y\)ᵀ\] = S Sᵀ.*got .* ± .* from 10000 draws"),
        (OtherDraws(), r"E\[∇nll\(z, y\) ∇nll\(z, y\)ᵀ\] = S Sᵀ"),
        (BiasedLoss(), r"E\[∇nll\(z, y\)\] = 0"),
        (DoubledLoss(), r"E\[∇²nll\] = S Sᵀ"),
        (OtherScore(), r"E\[score\(z\) score\(z\)ᵀ\] = S Sᵀ"),
        (ScoreOfOneSign(), r"E\[score\(z\)\] = 0"),
        (SummedLoss(), r"a value for each of samples\(z\): got 1 for 50000"),
        (GlobalDraws(), "sample draws from the generator"),
        (LongScore(), r"the shape and dtype of z: .*float64"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrong_likelihoods_are_found(likelihood: Likelihood, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_likelihood(likelihood, logits(5, 3).float())


def test_a_loss_without_second_derivatives() -> None:
    """Laplace's ½exp(−|y − z|): scores are signs, and ∇²nll is zero almost everywhere."""

    class Laplace(Likelihood):
        def factor(self, z: Tensor) -> Factor:
            return Diagonal(torch.ones_like(z))

        def nll(self, z: Tensor, y: Tensor) -> Tensor:
            return (y - z).abs()

        def sample(self, z: Tensor, generator: torch.Generator | None = None) -> Tensor:
            uniform = torch.rand(z.shape, generator=generator, dtype=z.dtype) - 0.5
            return z - uniform.sign() * (1 - 2 * uniform.abs()).log()

    check_likelihood(Laplace(), logits(4, 2), is_smooth=False)
    with pytest.raises(AssertionError, match="∇²nll"):
        check_likelihood(Laplace(), logits(4, 2))


# --- S Sᵀ in closed form ---------------------------------------------------------------------


def test_categorical_matrix() -> None:
    z = logits(4)
    p = z.exp() / z.exp().sum()
    want = torch.diag(p) - torch.outer(p, p)
    assert_close(matrix(Categorical(), z), want, 1e-14, "diag(p) − ppᵀ")


def test_categorical_classes_on_another_axis() -> None:
    z = logits(2, 3, 5)  # (N, C, T), as cross_entropy wants it
    v = logits(2, 3, 5, seed=1)
    product = Categorical(dim=1).factor(z).matvec(v)
    moved = Categorical().factor(z.movedim(1, -1)).matvec(v.movedim(1, -1)).movedim(-1, 1)
    assert_close(product, moved, 1e-14, "dim=1")
    assert Categorical(dim=1).samples(z) == 10
    with pytest.raises(pb.PullbackError, match="does not fit"):
        Categorical(dim=0).factor(z)
    with pytest.raises(pb.PullbackError, match="Bernoulli"):
        Categorical().factor(logits(3, 1))


@pytest.mark.parametrize(
    ("likelihood", "want"),
    [
        (Bernoulli(), lambda z: torch.sigmoid(z) * (1 - torch.sigmoid(z))),
        (Poisson(), lambda z: torch.exp(z)),
        (Gaussian(0.25), lambda z: torch.full_like(z, 4.0)),
        (MSE(), lambda z: torch.full_like(z, 2.0)),
        (
            Gaussian("learned"),
            lambda z: torch.stack([1 / z[2].exp(), 1 / z[3].exp(), z[0] * 0 + 0.5, z[0] * 0 + 0.5]),
        ),
    ],
    ids=["Bernoulli", "Poisson", "Gaussian", "MSE", "Gaussian learned"],
)
def test_diagonal_matrices(likelihood: Likelihood, want) -> None:
    z = logits(4)
    assert_close(matrix(likelihood, z), torch.diag(want(z)), 1e-14, "closed form")


# --- M = E[∇nll ∇nllᵀ] ----------------------------------------------------------------------


def score_moment(likelihood: Likelihood, z: Tensor, outcomes: Tensor, weights: Tensor) -> Tensor:
    """Σ_y weight(y) ∇nll(z, y) ∇nll(z, y)ᵀ, gradients by autograd."""
    total = torch.zeros(z.numel(), z.numel(), dtype=z.dtype)
    for y, weight in zip(outcomes, weights, strict=True):
        leaf = z.clone().requires_grad_()
        nll = likelihood.nll(leaf[None], y[None]).sum()
        (g,) = torch.autograd.grad(nll, leaf)
        total += weight * torch.outer(g.flatten(), g.flatten())
    return total


def test_categorical_score_by_enumeration() -> None:
    z = logits(4)
    moment = score_moment(Categorical(), z, torch.arange(4), torch.softmax(z, 0))
    assert_close(moment, matrix(Categorical(), z), 1e-14, "E[score scoreᵀ] = M")


def test_bernoulli_score_by_enumeration() -> None:
    z = logits(2)
    p = torch.sigmoid(z)
    outcomes = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=z.dtype)
    weights = (outcomes * p + (1 - outcomes) * (1 - p)).prod(1)
    moment = score_moment(Bernoulli(), z, outcomes, weights)
    assert_close(moment, matrix(Bernoulli(), z), 1e-14, "E[score scoreᵀ] = M")


def test_poisson_score_by_enumeration() -> None:
    z = torch.tensor([0.7], dtype=torch.float64)
    rate = exp(0.7)
    counts = torch.arange(60, dtype=z.dtype)[:, None]
    weights = torch.tensor([exp(k * log(rate) - rate - lgamma(k + 1)) for k in range(60)])
    moment = score_moment(Poisson(), z, counts, weights.double())
    assert_close(moment, matrix(Poisson(), z), 1e-6, "E[score scoreᵀ] = M")


@pytest.mark.parametrize("name", ["Gaussian", "Gaussian learned", "MSE"])
def test_gaussian_score_by_quadrature(name: str) -> None:
    """Gauss–Hermite nodes integrate the quartics exactly; the spread comes from the density."""
    likelihood = LIKELIHOODS[name]
    z = logits(2)
    nodes, weights = (
        torch.tensor(a) for a in __import__("numpy").polynomial.hermite_e.hermegauss(8)
    )
    weights = weights / weights.sum()
    if name == "Gaussian learned":  # z = (mean, log-variance)
        outcomes = (z[0] + (0.5 * z[1]).exp() * nodes)[:, None]
        mass = weights
    else:
        spread = {"Gaussian": 0.3**0.5, "MSE": 0.5**0.5}[name]
        grid = torch.cartesian_prod(nodes, nodes)
        outcomes = z + spread * grid
        mass = torch.outer(weights, weights).flatten()
    moment = score_moment(likelihood, z, outcomes, mass)
    assert_close(moment, matrix(likelihood, z), 1e-12, "E[score scoreᵀ] = M")


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_samples_have_the_fisher_information(name: str) -> None:
    """Monte Carlo over `sample`, so that it and `nll` speak of one distribution."""
    likelihood = LIKELIHOODS[name]
    z = logits(4, seed=3) * 0.5
    draws = 20_000
    logits_of_draws = z.expand(draws, 4).clone().requires_grad_()
    y = likelihood.sample(logits_of_draws.detach(), torch.Generator().manual_seed(0))
    (g,) = torch.autograd.grad(likelihood.nll(logits_of_draws, y).sum(), logits_of_draws)
    mean = g.mean(0)
    assert float(mean.norm()) < 0.1 * float(g.norm(dim=1).mean()), f"E[score] = {mean}"
    assert_close(g.T @ g / draws, matrix(likelihood, z), 0.05, "E[score scoreᵀ] = M")


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_samples_repeat_with_their_generator(name: str) -> None:
    likelihood = LIKELIHOODS[name]
    z = logits(3, 4)
    one, two = (likelihood.sample(z, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("classes", "dtype"), [(3, torch.float64), (600, torch.bfloat16), (3072, torch.float32)]
)
def test_classes_are_drawn_by_their_probabilities(classes: int, dtype: torch.dtype) -> None:
    """χ² of many draws, whose mean is the number of classes less one; scores are p − e_y."""
    generator = torch.Generator().manual_seed(classes)
    n = 8000
    z = torch.randn(classes, generator=generator).to(dtype)
    z[[1, -1]] = -torch.inf
    p = torch.softmax(z.double(), 0)
    likelihood = Categorical()
    scores = [likelihood.score(z.expand(n // 4, -1), generator).double() for _ in range(4)]
    counts = torch.cat([s.argmin(1) for s in scores]).bincount(minlength=classes)
    live = p > 0
    assert counts[~live].sum() == 0
    chi = ((counts - n * p).square() / (n * p))[live].sum()
    degrees = int(live.sum()) - 1
    assert abs(float(chi) - degrees) < 6 * (2 * degrees) ** 0.5 + 6
    e = F.one_hot(scores[0].argmin(1), classes)
    assert_close(scores[0], p - e, 1e-12 if dtype == torch.float64 else 1e-2, "p − e_y")


LOSSES = {
    "Categorical": lambda z, how: F.cross_entropy(z, torch.arange(5) % 4, reduction=how),
    "Bernoulli": lambda z, how: F.binary_cross_entropy_with_logits(
        z, torch.ones_like(z), reduction=how
    ),
    "MSE": lambda z, how: F.mse_loss(z, torch.ones_like(z), reduction=how),
    "Poisson": lambda z, how: F.poisson_nll_loss(z, torch.ones_like(z), reduction=how),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_is_torchs_mean(name: str) -> None:
    """`samples` is what torch divides by, and nll is torch's loss."""
    likelihood = LIKELIHOODS[name]
    z = logits(5, 4)
    ratio = LOSSES[name](z, "sum") / LOSSES[name](z, "mean")
    assert likelihood.samples(z) == round(float(ratio))
    if name == "Categorical":
        y = torch.arange(5) % 4
    else:
        y = torch.ones_like(z)
    assert_close(likelihood.nll(z, y).sum(), LOSSES[name](z, "sum"), 1e-14, "nll")


# --- extreme outputs ------------------------------------------------------------------------

EXTREMES = [
    [1e4, -1e4, 0.0, 1.0],
    [-1e4, -1e4, -1e4, -1e4],
    [1e4, 1e4, 1e4, 1e4],
    [1e4, -1e4, 1e4, -1e4],
    [90.0, -90.0, 710.0, -750.0],
]


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("row", EXTREMES, ids=str)
def test_finite_at_extreme_outputs(name: str, dtype: torch.dtype, row: list[float]) -> None:
    z = torch.tensor([row, [0.0, 1.0, 2.0, 3.0]], dtype=dtype)
    factor = LIKELIHOODS[name].factor(z)
    for v in (torch.ones_like(z), torch.tensor([[-3.0, 100, 2, 5]] * 2).to(z)):
        for value in (factor.matvec(v), factor.transpose(v), factor.apply(v)):
            assert bool(torch.isfinite(value).all()), value
    assert bool(torch.isfinite(factor.covectors(z)).all())
    check_factor(factor, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_categorical_whitened_gradient_between_the_extremes(dtype: torch.dtype) -> None:
    """(p − y)/√p is huge but representable where p is tiny; S r = g to the last digits."""
    depth = 80.0 if dtype == torch.float32 else 600.0
    z = torch.tensor([[0.0, -depth, -1.0]], dtype=dtype)
    g = torch.softmax(z, -1) - F.one_hot(torch.tensor([1]), 3).to(z)
    factor = Categorical().factor(z)
    whitened = factor.whiten(g)
    assert whitened.value is not None
    assert float(whitened.value.abs().max()) > 1e15
    p = torch.softmax(z.double(), -1)
    want = (p - F.one_hot(torch.tensor([1]), 3)) * (-0.5 * torch.log_softmax(z.double(), -1)).exp()
    assert_close(whitened.value, want, 1e-5 if dtype == torch.float32 else 1e-12, "(p − y)/√p")
    assert_close(factor.apply(whitened.value), g, 10 * torch.finfo(dtype).eps, "S r = g")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whiten_fails_as_a_value_that_names_damping(dtype: torch.dtype) -> None:
    z = torch.tensor([[1e4, -1e4, 0.0]], dtype=dtype)
    g = torch.tensor([[1.0, -1.0, 0.0]], dtype=dtype)  # the label has probability e^{−2e4}
    whitened = Categorical().factor(z).whiten(g)
    assert whitened.value is None
    assert whitened.status is pb.Status.NOT_REPRESENTABLE
    assert "damping" in whitened.status.value
    assert not whitened.status.ok
    right = torch.zeros_like(z)  # the label is certain: nothing to represent, r = 0
    assert_close(Categorical().factor(z).whiten(right).value, right, 0.0, "r = 0")


def test_whiten_refuses_what_is_outside_the_range() -> None:
    """Softmax never pulls along (1, …, 1)."""
    whitened = Categorical().factor(logits(2, 3)).whiten(torch.ones(2, 3).double())
    assert whitened.status is pb.Status.NOT_REPRESENTABLE
    lost = Bernoulli().factor(torch.tensor([[1e4]])).whiten(torch.tensor([[1.0]]))
    assert lost.status is pb.Status.NOT_REPRESENTABLE


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_step_at_extreme_logits_is_damped_and_finite(sign: float) -> None:
    """r is not representable, so the solve works from g, and moves the right way."""
    model = torch.nn.Linear(1, 3, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(sign * torch.tensor([[1e4], [-1e4], [0.0]]))
    x = torch.ones(2, 1).double()
    y = torch.tensor([2, 2])
    opt = pb.NaturalGradient(model, Fisher(Categorical()), pb.solvers.Cholesky(1e-3))

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    before = float(closure().detach())
    info = opt.step(closure)
    assert info.accepted
    assert not info.whitened
    assert bool(torch.isfinite(model.weight).all())
    assert float(closure().detach()) < before


# --- which positions count ------------------------------------------------------------------


def test_ignored_positions_leave_the_metric_and_its_mean() -> None:
    """A batch with ignored positions steps like the batch without them."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4).double()
    y = torch.tensor([[0, -100, 2], [1, 1, -100]])
    weight = torch.randn(3, 4).double()
    computed = []
    for ignore in (True, False):
        model = torch.nn.Linear(4, 3, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(weight)
        points, labels = (x, y) if ignore else (x[y >= 0][:, None], y[y >= 0][:, None])
        opt = pb.NaturalGradient(model, Fisher(Categorical()), pb.solvers.Cholesky(1e-2))

        def closure(model=model, points=points, labels=labels, opt=opt) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(points).flatten(0, 1), labels.flatten())
            loss.backward()
            return loss

        assert opt.step(closure).accepted
        computed.append(weight - model.weight.detach())
    assert_close(computed[0], computed[1], 1e-12, "the step with ignored positions")


@pytest.mark.parametrize("form", ["rows", "kernel", "dense", "matrix_free"])
def test_ignored_positions_pool_over_calls(form: str) -> None:
    """The mean is over the counted positions of all calls together."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 4).double()
    y = torch.tensor([[0, -100, 2], [1, 1, -100], [-100, -100, 0], [2, 1, 0]])
    weight = torch.randn(3, 4).double()
    computed = []
    for cuts in ([4], [1, 3]):
        model = torch.nn.Linear(4, 3, bias=False).double()
        with torch.no_grad():
            model.weight.copy_(weight)
        opt = pb.NaturalGradient(model, Fisher(Categorical()), pb.solvers.Cholesky(1e-2), gram=form)

        def closure(model=model, opt=opt, cuts=cuts) -> Tensor:
            opt.zero_grad()
            pieces = zip(x.split(cuts), y.split(cuts), strict=True)
            sums = [
                F.cross_entropy(model(a).flatten(0, 1), b.flatten(), reduction="sum")
                for a, b in pieces
            ]
            loss = torch.stack(sums).sum() / int((y >= 0).sum())
            loss.backward()
            return loss

        opt.step(closure)
        computed.append(weight - model.weight.detach())
    p = torch.softmax(x @ weight.T, -1)[y >= 0]
    j = torch.kron(torch.eye(3).double(), x[y >= 0][:, None]).flatten(0, 0)  # (8, 3, 12)
    m = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    gram = torch.einsum("nap,nab,nbq->pq", j, m, j) / 8 + 1e-2 * torch.eye(12).double()
    g = torch.einsum("nap,na->p", j, p - F.one_hot(y[y >= 0], 3)) / 8
    want = torch.linalg.solve(gram, g).view(3, 4)
    assert_close(computed[0], want, 1e-10, "one call")
    assert_close(computed[1], want, 1e-10, "two calls")


def test_a_certain_answer_is_not_an_ignored_one() -> None:
    """A zero gradient at a saturated position still counts in the mean."""
    z = torch.tensor([[800.0, 0.0], [0.3, 0.1], [0.5, 0.2]], dtype=torch.float64)
    cotangent = torch.tensor([[0.0, 0.0], [0.2, -0.2], [0.0, 0.0]], dtype=torch.float64)
    mask = Categorical().counted(z, cotangent)
    assert mask is not None
    assert mask.flatten().tolist() == [True, True, False]
    assert Categorical().counted(z[1:2], cotangent[1:2]) is None


def test_unusable_arguments_are_refused() -> None:
    for variance in (0.0, -1.0, "unknown"):
        with pytest.raises(pb.PullbackError, match="variance"):
            Gaussian(variance=variance)
    with pytest.raises(pb.PullbackError, match="log-variance"):
        Gaussian("learned").factor(logits(2, 3))
    with pytest.raises(pb.PullbackError, match="has no likelihood"):
        Fisher(Categorical)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, -1])
def test_classes_on_another_axis_than_the_loss_has_them(dim: int, dtype: torch.dtype) -> None:
    z = logits(3, 4, 5, 6).to(dtype).requires_grad_()
    classes = z.shape[dim]
    y = torch.arange(z.numel() // classes) % classes
    rows = z.movedim(dim, -1).flatten(0, -2)
    (g,) = torch.autograd.grad(F.cross_entropy(rows, y), z)
    assert Categorical(dim=dim).counted(z.detach(), g) is None
    for other in {1, 2, 3} - {dim % 4}:
        with pytest.raises(pb.PullbackError, match=rf"dim={dim % 4}\)"):
            Categorical(dim=other).counted(z.detach(), g)


def test_losses_that_say_nothing_of_the_classes_pass() -> None:
    """Not a function of probabilities, ignored altogether, or not finite: nothing is known."""
    z = logits(3, 4, 5)
    for g in (z.clone(), torch.zeros_like(z), torch.full_like(z, torch.nan), z - z.mean()):
        Categorical().counted(z, g)
    centered = z - z.mean(1, keepdim=True)
    Categorical().counted(z, centered - centered.mean(2, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_loss_that_has_shown_its_classes_is_not_refused_later(dtype: torch.dtype) -> None:
    """Cross-entropy and a smoothness of logits in time, of which the second is left in the end."""
    y = torch.arange(12).view(3, 4) % 5
    one = Categorical()
    for z in (logits(3, 4, 5), 200 * F.one_hot(y, 5) + logits(3, 4, 5)):
        z = z.to(dtype).requires_grad_()
        smooth = (z[:, 1:] - z[:, :-1]).square().mean()
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.01 * smooth
        (g,) = torch.autograd.grad(loss, z)
        one.counted(z.detach(), g)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_signs_do_not_add_up_to_zero(dtype: torch.dtype) -> None:
    z = logits(4, 2048, 3).to(dtype)
    for _ in range(20):
        Categorical().counted(z, torch.randn(z.shape).to(dtype))
