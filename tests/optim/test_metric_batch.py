"""The metric averaged over other inputs than the loss: population or test-set Fisher."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from .common import (
    DAMPING,
    DOUBLE,
    assert_close,
    closure_of,
    data,
    gradient,
    gram,
    mlp,
    solve_damped,
    vector,
)

FISHER = pb.metrics.Fisher(pb.likelihoods.Categorical())


def fisher(z: Tensor) -> Tensor:
    """(diag(p) − ppᵀ)/N, one matrix per sample."""
    p = z.softmax(1).detach()
    return (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / len(z)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, dtype=DOUBLE), torch.randint(0, 4, (samples,))


def oracle(model: nn.Module, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """The loss's gradient on x in the Fisher metric of the outputs z."""
    params = list(model.parameters())
    loss = F.cross_entropy(model(x), y)
    return solve_damped(gram(z, params, fisher(z)), gradient(loss, params), DAMPING)


def natural(model: nn.Module, **options) -> pb.NaturalGradient:
    options.setdefault("step", pb.steps.Constant())
    return pb.NaturalGradient(model, FISHER, pb.solvers.Cholesky(DAMPING), **options)


@pytest.mark.parametrize("population", [3, 50], ids=["sample space", "parameter space"])
@pytest.mark.parametrize("where", ["constructor", "step"])
def test_population_fisher(where: str, population: int) -> None:
    model = mlp(3, 5, 4)
    x, y = batch(6)
    other, _ = batch(population)
    want = oracle(model, x, y, model(other))
    at_start, at_step = (other, None) if where == "constructor" else (None, other)
    opt = natural(model, output=pb.optim.Outputs(metric_batch=at_start))
    before = vector(model)
    info = opt.step(closure_of(opt, model, x, y, F.cross_entropy), metric_batch=at_step)
    assert info.accepted
    assert not info.whitened
    assert info.rows == 4 * population
    assert_close(before - vector(model), want)


def test_the_steps_batch_wins_over_the_constructors() -> None:
    model = mlp(3, 5, 4)
    x, y = batch(6)
    one, _ = batch(7)
    two, _ = batch(8)
    want = oracle(model, x, y, model(two))
    opt = natural(model, output=pb.optim.Outputs(metric_batch=one))
    before = vector(model)
    opt.step(closure_of(opt, model, x, y, F.cross_entropy), metric_batch=two)
    assert_close(before - vector(model), want)


def test_the_loss_batch_as_metric_batch_changes_nothing_but_the_route() -> None:
    model = mlp(3, 5, 4)
    x, y = batch(6)
    want = oracle(model, x, y, model(x))
    opt = natural(model)
    before = vector(model)
    assert not opt.step(closure_of(opt, model, x, y, F.cross_entropy), metric_batch=x).whitened
    assert_close(before - vector(model), want)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 5, 4)

    def forward(self, x: Tensor, shift: Tensor | float = 0.0) -> Tensor:
        return self.net(x + shift)


@pytest.mark.parametrize("container", ["tuple", "dict", "Call"])
def test_arguments_and_keywords(container: str) -> None:
    model = Pair()
    x, y = batch(6)
    other, _ = batch(9)
    shift = torch.randn(9, 3, dtype=DOUBLE)
    want = oracle(model, x, y, model(other, shift))
    arguments = {
        "tuple": (other, shift),
        "dict": {"x": other, "shift": shift},
        "Call": pb.maps.Call.of(other, shift=shift),
    }[container]
    opt = natural(model)
    before = vector(model)
    opt.step(closure_of(opt, model, x, y, F.cross_entropy), metric_batch=arguments)
    assert_close(before - vector(model), want)


def test_a_line_search_and_an_output_selector() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(3, 5, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.net(x)}

    model = Packed()
    x, y = batch(6)
    other, _ = batch(9)
    want = oracle(model.net, x, y, model(other)["logits"])
    opt = natural(
        model,
        output=pb.optim.Outputs("logits", metric_batch=other),
        step=pb.steps.Backtracking(),
    )
    before = vector(model)
    info = opt.step(closure_of(opt, lambda x: model(x)["logits"], x, y, F.cross_entropy))
    assert info.accepted
    assert_close(before - vector(model), info.step_size * want)


@pytest.mark.parametrize("form", ["rows", "kernel", "matrix_free"])
def test_dropout_on_the_metric_batch_keeps_one_mask_and_the_random_state(form: str) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4)).to(DOUBLE)
    x, y = batch(6)
    other, _ = batch(9)
    opt = natural(model, gram=form, output=pb.optim.Outputs(metric_batch=other))
    params = list(model.parameters())
    start = torch.get_rng_state()
    g = gradient(F.cross_entropy(model(x), y), params)
    after = torch.get_rng_state()
    z = model(other)  # the metric's mask comes after the loss's
    want = solve_damped(gram(z, params, fisher(z)), g, DAMPING)
    torch.set_rng_state(start)
    before = vector(model)
    opt.step(closure_of(opt, model, x, y, F.cross_entropy))
    assert_close(before - vector(model), want, 1e-8)
    assert torch.equal(torch.get_rng_state(), after)


def test_ignored_targets_do_not_mask_another_batch() -> None:
    model = mlp(3, 5, 4)
    x, y = batch(6)
    other, _ = batch(6)
    y[:3] = -100
    want = oracle(model, x, y, model(other))
    opt = natural(model)
    before = vector(model)
    opt.step(closure_of(opt, model, x, y, F.cross_entropy), metric_batch=other)
    assert_close(before - vector(model), want)


def test_weights_that_are_a_function_of_the_inputs_see_the_metric_batch() -> None:
    model = mlp()
    x, y = data(6)
    other, _ = data(9)
    metric = pb.metrics.Weighted(pb.metrics.Euclidean(), lambda x: x.square().sum(1))
    solver = pb.solvers.Cholesky(DAMPING)
    opt = pb.NaturalGradient(
        model, metric, solver, lr=1.0, output=pb.optim.Outputs(metric_batch=other)
    )
    params = list(model.parameters())
    weights = other.square().sum(1)[:, None, None] * torch.eye(2, dtype=DOUBLE) / 9
    g = gradient(F.mse_loss(model(x), y), params)
    want = solve_damped(gram(model(other), params, weights), g, DAMPING)
    before = vector(model)
    opt.step(closure_of(opt, model, x, y))
    assert_close(before - vector(model), want)
