"""What is said of a loss that the metric does not fit, and of one that grows; never in vain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.likelihoods import Categorical
from tests.kfac_options import kfac_of
from tests.pairs import all_pairs

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
HOT = F.one_hot(Y, 3).float()


def natural(model: nn.Module) -> torch.optim.Optimizer:
    return pb.NaturalGradient(model, pb.metrics.Fisher(Categorical()), lr=1e-3)


def kfac(model: nn.Module) -> torch.optim.Optimizer:
    return kfac_of(model, 1e-3, likelihood=Categorical(), statistics_every=1)


MAKERS = pytest.mark.parametrize("make", [natural, kfac])


def train(make: Any, model: nn.Module, loss: Callable[[Tensor], Tensor], steps: int = 5) -> None:
    opt = make(model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model(X.to(next(model.parameters()).dtype)))
        value.backward()
        return value

    for _ in range(steps):
        opt.step(closure)


def network(*last: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), *last).to(dtype)


@MAKERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_softmax_before_the_loss_is_noticed_once(make: Any, dtype: torch.dtype) -> None:
    model = network(nn.Softmax(1), dtype=dtype)
    with pytest.warns(RuntimeWarning, match=r"are probabilities.*Leave the softmax out") as said:
        train(make, model, lambda z: F.cross_entropy(z, Y))
    assert sum("probabilities" in str(w.message) for w in said) == 1


SQUARES = {
    "mse_loss": lambda z: F.mse_loss(z, HOT),
    "half a sum": lambda z: 0.5 * (z - HOT).square().sum(),
    "scaled": lambda z: 1024 * (z - HOT).square().sum(1).mean(),
}


@MAKERS
@pytest.mark.parametrize("loss", SQUARES.values(), ids=SQUARES)
def test_a_squared_error_is_noticed_once(make: Any, loss: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"squared error.*MSELoss") as said:
        train(make, network(), loss)
    assert sum("squared error" in str(w.message) for w in said) == 1


TARGETS = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
SQUARES_OF_REAL_TARGETS = {
    "mean": lambda z: F.mse_loss(z, TARGETS),
    "half a mean over samples": lambda z: 0.5 * (z - TARGETS).square().sum(1).mean(),
    "sum": lambda z: F.mse_loss(z, TARGETS, reduction="sum"),
}


@pytest.mark.parametrize("optimizer", ["natural", "kfac"])
@pytest.mark.parametrize("likelihood", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()], ids=repr)
@pytest.mark.parametrize("loss", SQUARES_OF_REAL_TARGETS.values(), ids=SQUARES_OF_REAL_TARGETS)
def test_a_squared_error_of_real_targets_is_noticed_once(
    optimizer: str, likelihood: Any, loss: Any
) -> None:
    with pytest.warns(RuntimeWarning, match=r"squared error.*MSELoss") as messages:
        train(make_of_likelihood(optimizer, likelihood), network(), loss)
    assert sum("squared error" in str(each.message) for each in messages) == 1


def make_of_likelihood(name: str, likelihood: Any) -> Any:
    """A maker of the named optimizer with a likelihood, or a loss of torch."""
    if name == "natural":
        return lambda model: pb.NaturalGradient(model, likelihood=likelihood, lr=1e-4)
    return lambda model: pb.KFAC(
        model, 1e-4, rule="natural", likelihood=likelihood, statistics_every=1
    )


ENTROPIES: dict[Any, Callable[[str], Callable[[Tensor], Tensor]]] = {
    nn.CrossEntropyLoss: lambda reduction: lambda z: F.cross_entropy(z, Y, reduction=reduction),
    nn.BCEWithLogitsLoss: lambda reduction: (
        lambda z: F.binary_cross_entropy_with_logits(z, HOT, reduction=reduction)
    ),
}


@pytest.mark.parametrize("optimizer", ["natural", "kfac"])
@pytest.mark.parametrize(("reduction", "other"), [("mean", "sum"), ("sum", "mean")])
@pytest.mark.parametrize("loss_class", ENTROPIES)
def test_a_sum_under_a_mean_is_noticed_once(
    optimizer: str, reduction: str, other: str, loss_class: Any
) -> None:
    make = make_of_likelihood(optimizer, loss_class(reduction=reduction))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(make, network(), ENTROPIES[loss_class](reduction))
    with pytest.warns(RuntimeWarning, match=f"that of a {other} over samples") as messages:
        train(make, network(), ENTROPIES[loss_class](other))
    assert sum("over samples" in str(each.message) for each in messages) == 1


@pytest.mark.parametrize("optimizer", ["natural", "kfac"])
def test_an_output_without_a_batch_axis_is_noticed_once(optimizer: str) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).mean(0)

    make = make_of_likelihood(optimizer, pb.likelihoods.MSE())
    with pytest.warns(RuntimeWarning, match=r"3 samples.*lacks a batch axis") as messages:
        train(make, Pooled(), lambda z: F.mse_loss(z, TARGETS[0]))
    assert sum("batch axis" in str(each.message) for each in messages) == 1
    with pytest.raises(pb.PullbackError, match=r"one sample, give the model a batch"):
        train(
            make_of_likelihood(optimizer, Categorical()),
            Pooled(),
            lambda z: F.cross_entropy(z, Y[0]),
        )


IGNORED = torch.where(torch.arange(12) % 4 == 0, -100, Y)
CROSS_ENTROPIES = {
    "mean": lambda z: F.cross_entropy(z, Y),
    "sum": lambda z: F.cross_entropy(z, Y, reduction="sum"),
    "ignored targets": lambda z: F.cross_entropy(z, IGNORED),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, HOT),
}


@pytest.mark.parametrize("optimizer", ["natural", "kfac"])
@pytest.mark.parametrize(
    "likelihood", [pb.likelihoods.Gaussian(), pb.likelihoods.MSE()], ids=["Gaussian", "MSE"]
)
@pytest.mark.parametrize("loss", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
def test_a_cross_entropy_is_noticed_once(optimizer: str, likelihood: Any, loss: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"cross entropy.*likelihood=nn\.") as messages:
        train(make_of_likelihood(optimizer, likelihood), network(), loss)
    assert sum("cross entropy" in str(each.message) for each in messages) == 1


REGRESSIONS = {
    "random targets": lambda z: F.mse_loss(z, TARGETS),
    "labels": lambda z: F.mse_loss(z, HOT),
    "absolute": lambda z: F.l1_loss(z, TARGETS),
    "probabilities": lambda z: F.mse_loss(z.softmax(1), HOT),
    "soft labels": lambda z: F.cross_entropy(z, TARGETS.softmax(1)),
}


@pytest.mark.parametrize("loss", REGRESSIONS.values(), ids=REGRESSIONS)
def test_other_losses_of_a_regression_are_not_warned_of(loss: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(make_of_likelihood("natural", pb.likelihoods.MSE()), network(), loss)


def focal(nll: Tensor) -> Tensor:
    return ((1 - (-nll).exp()) ** 2 * nll).mean()


MASKED = Y.clone()
MASKED[::2] = -100
WEIGHT = torch.tensor([1.0, 5.0, 0.1])
LEGITIMATE: dict[str, Callable[[Tensor], Tensor]] = {
    "cross-entropy": lambda z: F.cross_entropy(z, Y),
    "scaled": lambda z: 65536 * F.cross_entropy(z, Y),
    "label smoothing": lambda z: F.cross_entropy(z, Y, label_smoothing=0.1),
    "soft targets": lambda z: F.cross_entropy(z, torch.softmax(X[:, :3], 1)),
    "class weights": lambda z: F.cross_entropy(z, Y, weight=WEIGHT),
    "ignored": lambda z: F.cross_entropy(z, MASKED),
    "masked": lambda z: (F.cross_entropy(z, Y, reduction="none") * (Y > 0)).mean(),
    "penalty": lambda z: F.cross_entropy(z, Y) + 0.1 * z.square().mean(),
    "z-loss": lambda z: F.cross_entropy(z, Y) + 1e-2 * z.logsumexp(1).square().mean(),
    "distillation": lambda z: F.cross_entropy(z, Y) + F.mse_loss(z, X[:, :3]),
    "log-probabilities": lambda z: F.nll_loss(z.log_softmax(1), Y),
    "focal": lambda z: focal(F.cross_entropy(z, Y, reduction="none")),
}


@pytest.mark.parametrize(
    ("make", "head", "loss"), all_pairs([natural, kfac], ["random", "zero", "bias 1/C"], LEGITIMATE)
)
def test_legitimate_losses_are_not_warned_of(make: Any, head: str, loss: str) -> None:
    model = network()
    if head != "random":
        weight, bias = model[2].parameters()
        nn.init.zeros_(weight)
        nn.init.constant_(bias, 0.0 if head == "zero" else 1 / 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(make, model, LEGITIMATE[loss])


def test_a_model_of_log_probabilities_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        train(natural, network(nn.LogSoftmax(1)), lambda z: F.nll_loss(z, Y))


def test_small_logits_are_no_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        z = torch.rand(6, 2, generator=generator).bfloat16()
        c = (z.float().softmax(1) - F.one_hot(torch.arange(6) % 2, 2)).bfloat16() / 6
        assert not Categorical().mismatch(z, c)
        assert not Categorical().mismatch(z.float(), c.float())


# --- growth -----------------------------------------------------------------------------------


def warn_while_growing(factor: float, steps: int, **options: Any) -> list[str]:
    model = nn.Linear(1, 1)
    opt = pb.NaturalGradient(model, lr=0.0, **options)
    scale = 1.0

    def closure() -> Tensor:
        opt.zero_grad()
        loss = scale * F.mse_loss(model(torch.ones(3, 1)), torch.full((3, 1), 5.0))
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(steps):
            opt.step(closure)
            scale = factor
    return [str(w.message) for w in said if "ten times" in str(w.message)]


def test_a_loss_that_has_grown_is_noticed_once() -> None:
    (said,) = warn_while_growing(11, 60)
    assert "LevenbergMarquardt" in said
    assert len(warn_while_growing(float("inf"), 60)) == 1


def test_a_loss_that_has_grown_less_or_for_a_moment_is_not() -> None:
    assert not warn_while_growing(9, 60)
    assert not warn_while_growing(11, 20)
    assert not warn_while_growing(11, 60, maximize=True)


# --- losses of derivatives --------------------------------------------------------------------


def pinn(model: nn.Module, x: Tensor, ends: Tensor) -> Tensor:
    """u'' = −π² sin πx with u = 0 at the ends, as it is commonly written."""
    u = model(x)
    slope = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    second = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    residual = second + torch.pi**2 * torch.sin(torch.pi * x)
    return residual.square().mean() + model(ends).square().mean()


def test_a_loss_of_derivatives_is_noticed_once_and_does_not_diverge() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.rand(64, 1).requires_grad_()
    ends = torch.tensor([[0.0], [1.0]])
    opt = pb.NaturalGradient(model)
    losses = []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = pinn(model, x, ends)
        loss.backward()
        return loss

    with pytest.warns(RuntimeWarning, match=r"derivatives.*objective=.*pde\.solve") as said:
        losses = [opt.step(closure).loss for _ in range(8)]
    assert sum("derivatives" in str(w.message) for w in said) == 1
    assert max(losses) == losses[0]


def test_a_loss_of_derivatives_alone_is_refused() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.rand(8, 1)
    opt = pb.NaturalGradient(model)
    x.requires_grad_()

    def closure() -> Tensor:
        opt.zero_grad()
        loss = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()
        loss.backward()
        return loss

    with pytest.raises(pb.PullbackError, match=r"objective=.*pde\.solve"):
        opt.step(closure)


def test_a_derivative_by_the_inputs_is_no_cotangent() -> None:
    """An adversarial input: the pass that finds it is no part of the loss."""
    torch.manual_seed(0)
    model = network(dtype=torch.float64)
    x = X.double().requires_grad_()
    opt = pb.NaturalGradient(model, likelihood=F.cross_entropy, solver=pb.solvers.Cholesky(0.1))
    plain = pb.NaturalGradient(model, likelihood=F.cross_entropy, solver=pb.solvers.Cholesky(0.1))
    ((slope,)) = torch.autograd.grad(F.cross_entropy(model(x), Y), x)
    moved = (x + 0.1 * slope.sign()).detach()

    def closure(attack: bool) -> Tensor:
        opt.zero_grad()
        if attack:
            torch.autograd.grad(F.cross_entropy(model(x), Y), x)
        loss = F.cross_entropy(model(moved), Y)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        direction = opt.direction(lambda: closure(True)).x
    assert torch.equal(direction, plain.direction(lambda: closure(False)).x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.net, x, use_reentrant=True)


def test_a_reentrant_checkpoint_is_refused() -> None:
    """It hides the parameters: their rows of the Jacobian would be zero."""
    opt = pb.NaturalGradient(model := Checkpointed())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(X.clone().requires_grad_()), Y)
        loss.backward()
        return loss

    with pytest.raises(pb.PullbackError, match="use_reentrant=False"):
        opt.step(closure)
