"""The Fubini–Study metric: the quantum geometric tensor, centered over the samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pullback as pb
from pullback.metrics import FubiniStudy, Weighted
from pullback.testing import assert_close, check_metric, jacobian
from tests.kfac_options import kfac_of
from tests.laws.models import mlp
from tests.laws.table import FORMS


def noise(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def positive_weights(x: Tensor) -> Tensor:
    return 0.5 + x.flatten(1).square().sum(1)


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2), (5, 2, 3)], ids=str)
@pytest.mark.parametrize(
    "metric",
    [FubiniStudy(), FubiniStudy(positive_weights), Weighted(FubiniStudy(), 2.0)],
    ids=["equal", "weighted", "scaled"],
)
def test_laws(shape: tuple[int, ...], metric: pb.metrics.Metric) -> None:
    check_metric(metric, noise(*shape), noise(5, 3, seed=1), tol=1e-12)


def test_constants_have_length_zero_and_zero_weights_are_allowed() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    factor = FubiniStudy(weights).factor(noise(4, 2))
    constant = torch.ones(4, 2, dtype=torch.float64)
    assert float(factor.matvec(constant).norm()) < 1e-14
    whitened = factor.whiten(factor.matvec(noise(4, 2, seed=3)))
    assert whitened.value is not None
    assert bool(torch.isfinite(whitened.value).all())


def test_a_gradient_that_moves_the_constant_is_not_representable() -> None:
    factor = FubiniStudy().factor(noise(4, 1))
    assert factor.whiten(torch.ones(4, 1, dtype=torch.float64)).value is None


def quantum_geometric_tensor(log_derivatives: Tensor, weights: Tensor) -> Tensor:
    """Re⟨(O − ⟨O⟩)*(O − ⟨O⟩)⟩ from complex rows O, (N, p), by sums over samples."""
    probabilities = (weights / weights.sum()).to(log_derivatives.dtype)
    mean = (probabilities[:, None] * log_derivatives).sum(0)
    total = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for probability, row in zip(probabilities, log_derivatives, strict=True):
        centered = row - mean
        total += (probability * torch.outer(centered.conj(), centered)).real
    return total


@pytest.mark.parametrize("weighted", [False, True], ids=["equal", "weighted"])
@pytest.mark.parametrize("form", FORMS)
def test_the_gram_is_the_quantum_geometric_tensor(form: str, weighted: bool) -> None:
    torch.manual_seed(0)
    model = mlp(3, 4, 2).double()
    x = noise(7, 3)
    rows = jacobian(model(x), list(model.parameters())).unflatten(0, (7, 2))
    weights = torch.ones(7, dtype=torch.float64)
    metric = FubiniStudy()
    if weighted:
        weights = positive_weights(x)
        metric = FubiniStudy(positive_weights)
    want = quantum_geometric_tensor(torch.complex(rows[:, 0], rows[:, 1]), weights)
    linear = pb.maps.ModuleMap(model, pb.maps.Call.of(x)).linearize(dict(model.named_parameters()))
    factor = pb.metrics.Scaled(metric.factor(linear.value, inputs=x), 1 / 7, (2,))
    gram = pb.grams.assemble([pb.grams.RowBlock(linear, factor)], form, 2**30)
    assert_close(gram.dense(), want, 1e-12, f"the tensor, held as {form}")


class Shifted(nn.Module):
    """Log-amplitude and phase with a constant that does not change the state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 4, 2)
        self.constant = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.constant


@pytest.mark.parametrize("form", ["rows", "kernel", "matrix_free"])
def test_steps_do_not_see_a_constant_in_log_psi(form: str) -> None:
    """A constant moves neither the direction nor itself, however large it is."""
    x = noise(5, 3)
    target = noise(5, 2, seed=2)
    directions = []
    for constant in (0.0, 30.0):
        torch.manual_seed(1)
        model = Shifted().double()
        with torch.no_grad():
            model.constant.fill_(constant)
        solver = pb.solvers.Cholesky(1e-3)
        opt = pb.NaturalGradient(model, FubiniStudy(), solver, gram=form)

        def closure(model: nn.Module = model, opt: pb.NaturalGradient = opt) -> Tensor:
            opt.zero_grad()
            z = model(x)
            loss = ((z - z.mean(0) - target) ** 2).mean()
            loss.backward()
            return loss

        directions.append(opt.direction(closure).x)
    assert_close(directions[1], directions[0], 1e-9, "the direction at another constant")
    assert float(directions[0][-2:].abs().max()) < 1e-10


def test_complex_outputs_are_measured_as_their_real_and_imaginary_parts() -> None:
    z = torch.view_as_complex(noise(6, 2))
    v = torch.view_as_complex(noise(6, 2, seed=1))
    metric = FubiniStudy(noise(6, seed=4).abs())
    as_complex = metric.factor(z).matvec(v)
    as_real = metric.factor(torch.view_as_real(z)).matvec(torch.view_as_real(v))
    assert_close(torch.view_as_real(as_complex), as_real, 1e-14, "M v of a complex output")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(3), "do not fit"),
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), "not usable"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), "not usable"),
        (torch.zeros(4), "not usable"),
    ],
    ids=["shape", "negative", "nan", "zero"],
)
def test_unusable_weights_are_refused(weights: Tensor, message: str) -> None:
    with pytest.raises(pb.PullbackError, match=message):
        FubiniStudy(weights).factor(noise(4, 2))


def test_weights_that_are_a_function_need_inputs() -> None:
    with pytest.raises(pb.PullbackError, match="inputs"):
        FubiniStudy(positive_weights).factor(noise(4, 2))


def test_kfac_refuses_it() -> None:
    model = mlp(3, 4, 2)
    opt = kfac_of(model, lr=0.1, metric=FubiniStudy())
    with pytest.raises(pb.PullbackError, match="couples"):
        _step_once(model, opt)


def _step_once(model: nn.Module, opt: pb.KFAC) -> None:
    model(torch.randn(5, 3)).square().mean().backward()
    opt.step()
