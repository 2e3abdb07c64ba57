"""`NaturalGradient` finds the closed forms by itself, and gets what the dense oracle gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback._core.capture import Call
from pullback.grams import RowBlock, assemble
from pullback.linear import DeepMatrix, DiagonalNetwork, LinearModel
from pullback.linear.grams import CoreLimits
from pullback.maps import ModuleMap
from pullback.metrics import Bregman, Euclidean, Fisher, Metric, Sobolev, Weighted
from pullback.optim import Outputs
from pullback.testing import check_gram, oracle, relative_error
from tests.pairs import all_pairs, each_once

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def deep(*dims: int) -> DeepMatrix:
    return DeepMatrix(list(dims), seed=1, dtype=DOUBLE)


def diagonal(dim: int, depth: int) -> DiagonalNetwork:
    return DiagonalNetwork(dim, depth, seed=1, dtype=DOUBLE)


X = draw(7, 4)
FEW = draw(2, 4)
ENTRIES = torch.tensor([0, 1, 3, 3]), torch.tensor([2, 2, 0, 1])

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "linear": (lambda: LinearModel(4, draw(4), dtype=DOUBLE), (X,)),
    "linear, few": (lambda: LinearModel(4, draw(4), dtype=DOUBLE), (FEW,)),
    "diagonal": (lambda: diagonal(4, 3), (X,)),
    "diagonal, few": (lambda: diagonal(4, 2), (FEW,)),
    "diagonal beta": (lambda: diagonal(4, 3), ()),
    "one matrix": (lambda: deep(4, 3), ()),
    "one matrix on x": (lambda: deep(4, 3), (X,)),
    "two": (lambda: deep(4, 6, 3), ()),
    "two, narrow": (lambda: deep(4, 1, 3), ()),
    "two on x": (lambda: deep(4, 2, 3), (X,)),
    "three": (lambda: deep(4, 6, 5, 3), ()),
    "three, narrow": (lambda: deep(4, 2, 2, 3), ()),
    "three on x": (lambda: deep(4, 5, 6, 3), (FEW,)),
    "entries": (lambda: deep(4, 5, 3), ENTRIES),
}
METRICS: dict[str, Metric] = {
    "Euclidean": Euclidean(),
    "MSE": Fisher(pb.likelihoods.MSE()),
    "Gaussian": Fisher(pb.likelihoods.Gaussian(2.0)),
    "Bernoulli": Fisher(pb.likelihoods.Bernoulli()),
    "Poisson": Fisher(pb.likelihoods.Poisson()),
}
SOLVERS = {
    "pinv": (lambda: pb.solvers.PseudoInverse(), 0.0),
    "cholesky": (lambda: pb.solvers.Cholesky(1e-2), 1e-2),
    "cg": (lambda: pb.solvers.ConjugateGradient(1e-2, tol=1e-14), 1e-2),
}


def loss(z: Tensor) -> Tensor:
    return F.softplus(z + 0.3).mean() + 0.1 * (z - 1).square().mean()


def closure_of(opt: pb.NaturalGradient, model: nn.Module, args: Any, f: Any = loss) -> Any:
    def closure() -> Tensor:
        opt.zero_grad()
        value = f(model(*args))
        value.backward()
        return value

    return closure


@pytest.mark.parametrize(("name", "metric", "solver"), all_pairs(MODELS, METRICS, SOLVERS))
def test_closed_forms_equal_the_oracle(name: str, metric: str, solver: str) -> None:
    build, args = MODELS[name]
    model = build()
    chosen = METRICS[metric]
    make, damping = SOLVERS[solver]
    opt = pb.NaturalGradient(model, chosen, make())
    closure = closure_of(opt, model, args)
    want = oracle(model, args, chosen, lambda z: loss(z)).solve(damping)
    direction = opt.direction(closure)
    assert float(relative_error(direction.x, want)) < 1e-9
    assert opt.step(closure).gram == "closed form"


@pytest.mark.parametrize(
    ("metric", "damping", "dims"),
    all_pairs(
        [
            Fisher(pb.likelihoods.Categorical()),
            Weighted(Euclidean(), torch.linspace(0.1, 2, 7, dtype=DOUBLE)),
            Bregman(lambda z: z.exp().sum(-1)),
            Sobolev(0.7),
        ],
        [0.0, 1e-2],
        [(4, 3), (4, 2, 3), (4, 6, 5, 3)],
    ),
)
def test_any_metric_on_a_batch(metric: Metric, damping: float, dims: tuple[int, ...]) -> None:
    model = deep(*dims)
    if damping:
        solver = pb.solvers.Cholesky(damping)
    else:
        solver = pb.solvers.PseudoInverse()
    opt = pb.NaturalGradient(model, metric, solver)

    def cross_entropy(z: Tensor) -> Tensor:
        return F.cross_entropy(z, torch.arange(len(z)) % 3)

    want = oracle(model, X, metric, cross_entropy).solve(damping)
    closure = closure_of(opt, model, (X,), cross_entropy)
    assert float(relative_error(opt.direction(closure).x, want)) < 1e-8
    assert opt.step(closure).gram == "closed form"


@pytest.mark.parametrize(("name", "metric"), each_once(MODELS, ["Euclidean", "Bernoulli"]))
def test_laws_of_the_grams(name: str, metric: str) -> None:
    build, args = MODELS[name]
    model = build()
    linear = ModuleMap(model, Call.of(*args)).linearize(dict(model.named_parameters()))
    factor = METRICS[metric].factor(linear.value)
    with torch.no_grad():
        gram = assemble([RowBlock(linear, factor)], "auto", 2**30)
        assert gram.structure.closed
        check_gram(gram)
        rows = assemble([RowBlock(linear, factor)], "rows", 2**30)
    assert float(relative_error(gram.dense(), rows.dense())) < 1e-12


def test_large_tangents_are_held_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = CoreLimits(side=2, entries=4)
    monkeypatch.setattr("pullback.linear.grams.make_tangent_gram.__defaults__", (limits,))
    for name in ("three", "three on x", "entries"):
        build, args = MODELS[name]
        for make, damping in SOLVERS.values():
            model = build()
            opt = pb.NaturalGradient(model, Fisher(pb.likelihoods.Bernoulli()), make())
            want = oracle(model, args, opt.metric, loss).solve(damping)
            direction = opt.direction(closure_of(opt, model, args))
            assert float(relative_error(direction.x, want)) < 1e-6


def test_a_regularizer_counts() -> None:
    model = deep(4, 6, 3)
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(0.1))

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model()) + sum(w.square().sum() for w in model.parameters())
        value.backward()
        return value

    dense = oracle(model, (), Euclidean(), loss)
    closure()
    gradient = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
    want = dense.solve(0.1, gradient)
    assert float(relative_error(opt.direction(closure).x, want)) < 1e-12


def test_frozen_factors_and_param_groups() -> None:
    for build, args in (
        (lambda: deep(4, 6, 3), ()),
        (lambda: deep(4, 5, 5, 3), (X,)),
        (lambda: diagonal(4, 3), (X,)),
    ):
        model = build()
        model.factors[0].requires_grad_(False)
        opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse())
        closure = closure_of(opt, model, args)
        want = oracle(model, args, Euclidean(), loss).solve()
        assert float(relative_error(opt.direction(closure).x, want)) < 1e-10
        assert opt.step(closure).gram == "closed form"
    model = deep(4, 6, 3)
    groups = [{"params": [model.factors[1]]}, {"params": [model.factors[0]]}]
    opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse(), params=groups)
    rotated = [model.factors[1], model.factors[0]]
    want = oracle(model, (), Euclidean(), loss, params=rotated).solve()
    closure = closure_of(opt, model, ())
    assert float(relative_error(opt.direction(closure).x, want)) < 1e-10
    assert opt.step(closure).gram == "closed form"


class Shifted(DeepMatrix):
    def forward(self, x: Any = None, columns: Any = None) -> Tensor:
        return super().forward(x, columns).tanh()


def tied() -> nn.Module:
    model = deep(3, 3, 3)
    model.factors[1] = model.factors[0]
    return model


def make_hooked() -> nn.Module:
    model = diagonal(4, 2)
    model.register_forward_hook(lambda module, args, out: out.sin())
    return model


@pytest.mark.parametrize(
    ("build", "args", "outputs"),
    [
        (lambda: Shifted([4, 5, 3], seed=0, dtype=DOUBLE), (X,), Outputs()),
        (tied, (), Outputs()),
        (make_hooked, (X,), Outputs()),
        (lambda: nn.Sequential(deep(4, 3, 3), nn.Tanh()), (X,), Outputs()),
        (lambda: deep(4, 3, 3), (draw(5, 2, 4),), Outputs()),
        (lambda: deep(4, 3, 3), (X,), Outputs(batch_dim=1)),
        (lambda: deep(4, 3, 3), (X,), Outputs(lambda z: z)),
    ],
    ids=["subclass", "tied", "hooked", "inside another", "axes", "batch_dim", "output"],
)
def test_refused_where_the_structure_does_not_apply(
    build: Any, args: Any, outputs: Outputs
) -> None:
    model = build()
    opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse(), output=outputs)
    closure = closure_of(opt, model, args)
    want = oracle(
        model, args, Euclidean(), loss, output=outputs.select, batch_dim=outputs.batch_dim
    ).solve()
    assert float(relative_error(opt.direction(closure).x, want)) < 1e-9
    assert opt.step(closure).gram != "closed form"


def test_several_calls_pool_without_a_closed_form() -> None:
    model = deep(4, 5, 3)
    opt = pb.NaturalGradient(model, solver=pb.solvers.Cholesky(1e-2))

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss(model(X)) + loss(model(FEW))
        value.backward()
        return value

    assert opt.step(closure).gram != "closed form"


def test_singular_and_broken_points_are_reported_not_stepped_into() -> None:
    for model in (DeepMatrix([3, 3, 3], 0.0, dtype=DOUBLE), DiagonalNetwork(4, 3, 0.0)):
        opt = pb.NaturalGradient(model, solver=pb.solvers.PseudoInverse())
        info = opt.step(closure_of(opt, model, ()))
        assert not info.accepted or not any(w.any() for w in model.parameters())
        assert not info.status.ok
    model = deep(3, 3, 3)
    model.factors[0].data[0, 0] = torch.nan
    opt = pb.NaturalGradient(model)
    assert not opt.step(closure_of(opt, model, ())).accepted


def train(opt: pb.NaturalGradient, model: nn.Module, f: Any, steps: int) -> pb.StepInfo:
    for _ in range(steps - 1):
        opt.step(closure_of(opt, model, (), f))
    return opt.step(closure_of(opt, model, (), f))


def test_other_steps_and_float32() -> None:
    target = draw(4, 3)
    model = DeepMatrix([4, 6, 3], seed=0, dtype=torch.float32)
    mse = Fisher(pb.likelihoods.MSE())
    opt = pb.NaturalGradient(model, mse, pb.solvers.PseudoInverse(), pb.steps.GridLineSearch())
    info = train(opt, model, lambda z: F.mse_loss(z, target.float()), 20)
    assert info.gram == "closed form"
    assert info.loss < 1e-8
    model = deep(4, 6, 5, 3)
    opt = pb.DampedGaussNewton(model)
    info = train(opt, model, lambda z: 0.5 * (z - target).square().sum(-1).mean(), 20)
    assert info.gram == "closed form"
    assert info.loss < 1e-10


def test_completion_by_the_metric_of_all_entries_moves_the_observed_alone() -> None:
    """The natural gradient does not generalize: unobserved entries stay, to first order."""
    model = deep(4, 6, 6, 4)
    target = draw(4)
    rows = torch.tensor([0, 1, 2, 3])
    columns = torch.tensor([1, 1, 3, 0])
    opt = pb.NaturalGradient(
        model, solver=pb.solvers.PseudoInverse(), output=pb.optim.Outputs(metric_batch=())
    )

    def closure() -> Tensor:
        opt.zero_grad()
        value = 0.5 * (model(rows, columns) - target).square().mean()
        value.backward()
        return value

    x = opt.direction(closure).x
    before = model.beta.detach().clone()
    h = 1e-6
    with torch.no_grad():
        nn.utils.vector_to_parameters(
            nn.utils.parameters_to_vector(model.parameters()) - h * x, model.parameters()
        )
    moved = (model.beta.detach() - before) / h
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[rows, columns] = True
    assert float(moved[~mask].abs().max()) < 1e-4 * float(moved[mask].abs().max())
