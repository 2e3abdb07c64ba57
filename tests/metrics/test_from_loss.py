"""Losses of torch as likelihoods: the metric is the Hessian of the loss at the outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.likelihoods import Categorical, from_loss, reduction_of
from pullback.testing import assert_close
from tests.kfac_options import kfac_of

DAMPING = 0.01
CLASSES = torch.tensor([0, 2, 1, 2, 0])
REALS = torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3)
BITS = (REALS > 0).double()
COUNTS = torch.arange(15, dtype=torch.float64).view(5, 3) % 4

LOSSES: dict[str, tuple[Any, Tensor]] = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), CLASSES),
    "CrossEntropyLoss sum": (nn.CrossEntropyLoss(reduction="sum"), CLASSES),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), CLASSES),
    "ignore_index": (nn.CrossEntropyLoss(ignore_index=2), CLASSES),
    "soft targets": (nn.CrossEntropyLoss(), torch.softmax(REALS, 1)),
    "cross_entropy": (F.cross_entropy, CLASSES),
    "partial": (partial(F.cross_entropy, label_smoothing=0.1, reduction="sum"), CLASSES),
    "MSELoss": (nn.MSELoss(), REALS),
    "MSELoss sum": (nn.MSELoss(reduction="sum"), REALS),
    "mse_loss": (F.mse_loss, REALS),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), BITS),
    "BCEWithLogitsLoss sum": (nn.BCEWithLogitsLoss(reduction="sum"), BITS),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, BITS),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(full=True), COUNTS),
    "poisson_nll_loss": (F.poisson_nll_loss, COUNTS),
}


def gauss_newton(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> Tensor:
    """(JᵀHJ + λ)⁻¹∇L, with J and the loss's Hessian H at the outputs by autograd."""
    params = list(model.parameters())
    z = model(x)
    rows = [torch.autograd.grad(v, params, retain_graph=True) for v in z.flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    at = z.detach().requires_grad_()
    slope = torch.autograd.grad(loss(at, y), at)[0].flatten()
    hessian = torch.autograd.functional.hessian(lambda v: loss(v.view_as(z), y), z.flatten())
    gram = jacobian.T @ torch.as_tensor(hessian) @ jacobian
    return torch.linalg.solve(gram + DAMPING * torch.eye(len(gram)).to(gram), jacobian.T @ slope)


@pytest.mark.parametrize(("loss", "y"), LOSSES.values(), ids=LOSSES)
def test_the_metric_is_the_hessian_of_the_loss(loss: Any, y: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(5, 2, dtype=torch.float64)
    want = gauss_newton(model, x, y, loss)
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(DAMPING), likelihood=loss)

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    assert_close(opt.direction(closure).x, want, 1e-10, "(JᵀHJ + λ)⁻¹g")


def test_cross_entropy_of_images_has_its_classes_on_axis_1() -> None:
    z = torch.randn(2, 3, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (2, 4))
    hessian = torch.autograd.functional.hessian(lambda v: F.cross_entropy(v, y), z)
    metric = pb.metrics.Fisher(nn.CrossEntropyLoss())
    v = torch.randn_like(z)
    want = torch.einsum("abcdef,def->abc", torch.as_tensor(hessian), v)
    assert_close(metric.factor(z).matvec(v) / metric.samples(z), want, 1e-12, "Hv")


@pytest.mark.parametrize("positions", [3, 5])
@pytest.mark.parametrize("rule", [None, "natural", "eigenbasis"])
def test_classes_are_found_where_a_loss_of_flattened_logits_has_them(
    rule: str | None, positions: int
) -> None:
    """Also where there are as many places as classes."""
    loss = nn.CrossEntropyLoss()
    ends = []
    torch.manual_seed(1)
    x = torch.randn(8, positions, 2, dtype=torch.float64)
    y = torch.randint(0, 3, (8, positions))
    for argument in (loss, Categorical()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        opt: Any = (
            pb.NaturalGradient(model, likelihood=argument, solver=pb.solvers.Cholesky(DAMPING))
            if rule is None
            else kfac_of(model, 0.1, likelihood=argument, rule=rule)
        )

        def closure(opt: Any = opt, model: nn.Module = model) -> Tensor:
            opt.zero_grad()
            value = loss(model(x).flatten(0, 1), y.flatten())
            value.backward()
            return value

        if rule is None:
            opt.step(closure)
        else:
            closure()
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close(ends[0], ends[1], 1e-14, "the step")


def test_two_axes_on_which_classes_may_be_are_refused() -> None:
    z = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    centered = z - z.mean(2, keepdim=True)
    centered -= centered.mean(3, keepdim=True)
    with pytest.raises(pb.PullbackError, match="does not fit the loss"):
        from_loss(nn.CrossEntropyLoss()).counted(z, centered)


def test_a_loss_with_other_terms_does_not_show_its_classes() -> None:
    model = nn.Linear(5, 4).double()
    x = torch.randn(8, 3, 5, dtype=torch.float64)
    y = torch.randint(0, 4, (24,))
    opt = kfac_of(model, 0.1, likelihood=nn.CrossEntropyLoss())
    z = model(x)
    penalty = z.logsumexp(-1).square().mean()
    loss = F.cross_entropy(z.flatten(0, 1), y) + 1e-2 * penalty
    with pytest.raises(pb.PullbackError, match="does not show which axis"):
        loss.backward()
    opt.close()


def test_log_probabilities_have_the_metric_of_their_logits() -> None:
    z = torch.randn(4, 3, dtype=torch.float64)
    log_p = z.log_softmax(1)
    v = torch.randn_like(z)
    of_logits = Categorical().factor(z)
    of_logs = from_loss(nn.NLLLoss()).factor(log_p)
    assert_close(of_logs.matvec(v), of_logits.matvec(v), 1e-14, "M v")


@pytest.mark.parametrize("make", [pb.GaussNewton, pb.DampedGaussNewton, pb.HessianFree])
def test_presets_take_a_loss_and_its_reduction(make: Any) -> None:
    model = nn.Linear(2, 3)
    assert make(model, nn.CrossEntropyLoss()).outputs.reduction == "mean"
    summed = nn.CrossEntropyLoss(reduction="sum")
    opt = make(model, summed)
    assert opt.outputs.reduction == "sum"
    assert isinstance(opt.metric.likelihood, Categorical)
    mean = pb.optim.Outputs(reduction="mean")
    assert make(model, summed, output=mean).outputs.reduction == "mean"


def test_kfac_takes_a_loss_as_it_takes_its_likelihood() -> None:
    loss = nn.CrossEntropyLoss(reduction="sum")
    ends = []
    x = torch.randn(8, 2, dtype=torch.float64)
    y = torch.arange(8) % 3
    for argument in (loss, Categorical()):
        torch.manual_seed(0)
        model = nn.Linear(2, 3).double()
        reduction = None if isinstance(argument, nn.Module) else "sum"
        opt = kfac_of(model, 0.1, likelihood=argument, reduction=reduction)
        assert opt.reduction == "sum"
        loss(model(x), y).backward()
        opt.step()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)
    assert kfac_of(nn.Linear(2, 3), 0.1, likelihood=loss, reduction="mean").reduction == "mean"


class Focal(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) ** 2


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "Weighted"),
        (partial(F.cross_entropy, weight=torch.ones(3)), "weight="),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), "pos_weight="),
        (nn.GaussianNLLLoss(), "log-variance"),
        (nn.BCELoss(), "BCEWithLogitsLoss"),
        (F.binary_cross_entropy, "BCEWithLogitsLoss"),
        (nn.PoissonNLLLoss(log_input=False), "log_input=True"),
        (nn.L1Loss(), "Categorical"),
        (nn.MSELoss, "Categorical"),
        (Focal(), "Categorical"),
        ("cross_entropy", "Categorical"),
    ],
)
def test_losses_without_a_likelihood_are_refused(loss: Any, said: str) -> None:
    for make in (pb.DampedGaussNewton, partial(pb.KFAC, lr=0.1)):
        with pytest.raises(pb.PullbackError, match=said):
            make(nn.Linear(2, 3), likelihood=loss)


def test_a_loss_left_unreduced_says_nothing() -> None:
    assert reduction_of(nn.MSELoss(reduction="none")) == "mean"
    assert reduction_of(None) == "mean"
