"""What must not change the step: the form of G, duplicated data, the reduction, micro-batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.likelihoods import MSE, Bernoulli, Categorical, Poisson
from pullback.metrics import Euclidean, Fisher, Weighted
from pullback.testing import assert_close, jacobian
from tests.laws.models import Buffered, mlp
from tests.laws.table import FORMS
from tests.pairs import all_pairs, each_once


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def tanh_mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(1)
    return mlp(*sizes).double()


def data(n: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.arange(n) % classes


def move(model: nn.Module, opt: pb.NaturalGradient, loss) -> Tensor:
    """What one step adds to the parameters."""
    before = flat(model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    info = opt.step(closure)
    assert info.accepted, info.reason
    return flat(model) - before


@pytest.mark.parametrize(
    ("other", "sizes"),
    each_once(["kernel", "dense", "matrix_free"], [(3, 2, 3), (3, 8, 3)]),  # p < n, p > n
    ids=str,
)
def test_parameter_and_sample_space_walk_the_same_way(sizes: tuple[int, ...], other: str) -> None:
    """Twenty steps of one problem in two forms stay within 1e-10 of each other."""
    x, y = data(8)
    walked = []
    for form in ("rows", other):
        model = tanh_mlp(*sizes)
        solver = pb.solvers.Cholesky(damping=0.1)
        opt = pb.NaturalGradient(model, Fisher(Categorical()), solver, lr=0.5, gram=form)
        points = []
        for _ in range(20):
            move(model, opt, lambda model=model: F.cross_entropy(model(x), y))
            points.append(flat(model))
        walked.append(torch.stack(points))
    moved = float((walked[0][-1] - walked[0][0]).norm())
    assert moved > 0.1, f"the trajectory went nowhere ({moved:.1e})"
    gap = float((walked[0] - walked[1]).norm(dim=1).max())
    assert gap <= 1e-10, f"rows and {other} drift apart by {gap:.1e}"


LOSSES = {
    "Categorical": (Fisher(Categorical()), lambda z, y, how: F.cross_entropy(z, y, reduction=how)),
    "MSE": (
        Fisher(MSE()),
        lambda z, y, how: F.mse_loss(z, F.one_hot(y, 3).double(), reduction=how),
    ),
    "Bernoulli": (
        Fisher(Bernoulli()),
        lambda z, y, how: F.binary_cross_entropy_with_logits(
            z, F.one_hot(y, 3).double(), reduction=how
        ),
    ),
    "Poisson": (
        Fisher(Poisson()),
        lambda z, y, how: F.poisson_nll_loss(z, y[:, None].double().expand_as(z), reduction=how),
    ),
}


@pytest.mark.parametrize(("name", "form"), each_once(LOSSES, FORMS))
def test_duplicating_the_batch_changes_nothing(name: str, form: str) -> None:
    metric, loss = LOSSES[name]
    x, y = data()
    computed = []
    for times in (1, 3):
        model = tanh_mlp(3, 5, 3)
        opt = pb.NaturalGradient(model, metric, pb.solvers.Cholesky(1e-2), gram=form)
        repeated = x.repeat(times, 1)
        labels = y.repeat(times)
        computed.append(
            move(model, opt, lambda model=model, a=repeated, b=labels: loss(model(a), b, "mean"))
        )
    assert_close(computed[1], computed[0], 1e-9, "the step on a tripled batch")


@pytest.mark.parametrize(("name", "form"), each_once(LOSSES, FORMS))
def test_mean_and_sum_agree_when_damping_is_relative(name: str, form: str) -> None:
    metric, loss = LOSSES[name]
    x, y = data()
    computed = []
    for how in ("mean", "sum"):
        model = tanh_mlp(3, 5, 3)
        solver = pb.solvers.Cholesky(pb.solvers.Relative(0.05))
        opt = pb.NaturalGradient(
            model, metric, solver, gram=form, output=pb.optim.Outputs(reduction=how)
        )
        computed.append(move(model, opt, lambda model=model, how=how: loss(model(x), y, how)))
    assert_close(computed[1], computed[0], 1e-10, "the step from sums")


def test_absolute_damping_does_depend_on_the_reduction() -> None:
    """The law above is not vacuous."""
    metric, loss = LOSSES["Categorical"]
    x, y = data()
    computed = []
    for how in ("mean", "sum"):
        model = tanh_mlp(3, 5, 3)
        opt = pb.NaturalGradient(
            model, metric, pb.solvers.Cholesky(0.05), output=pb.optim.Outputs(reduction=how)
        )
        computed.append(move(model, opt, lambda model=model, how=how: loss(model(x), y, how)))
    assert float((computed[0] - computed[1]).norm()) > 0.1 * float(computed[0].norm())


@pytest.mark.parametrize(
    ("name", "form", "cuts"), all_pairs(LOSSES, FORMS, [(3, 3), (1, 2, 3)]), ids=str
)
def test_micro_batches_are_one_batch(name: str, form: str, cuts: tuple[int, ...]) -> None:
    """Several forward calls in one closure, their gradients accumulated."""
    metric, loss = LOSSES[name]
    x, y = data()
    whole = tanh_mlp(3, 5, 3)
    opt = pb.NaturalGradient(whole, metric, pb.solvers.Cholesky(1e-2), gram=form)
    want = move(whole, opt, lambda: loss(whole(x), y, "mean"))

    model = tanh_mlp(3, 5, 3)
    opt = pb.NaturalGradient(model, metric, pb.solvers.Cholesky(1e-2), gram=form)
    before = flat(model)

    def closure() -> float:
        opt.zero_grad()
        total = 0.0
        for a, b in zip(x.split(cuts), y.split(cuts), strict=True):
            share = loss(model(a), b, "mean") * len(a) / len(x)
            share.backward()
            total += float(share.detach())
        return total

    info = opt.step(closure)
    assert info.rows == 18
    assert_close(flat(model) - before, want, 1e-9, f"micro-batches of {cuts}")


@pytest.mark.parametrize("form", FORMS)
def test_calls_through_different_heads_pool(form: str) -> None:
    """Each call leaves other parameters untouched; together they are one batch of both heads."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 6)
            self.heads = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

        def forward(self, x: Tensor, head: int) -> Tensor:
            return self.heads[head](torch.tanh(self.body(x)))

    torch.manual_seed(0)
    model = Heads().double()
    x, _ = data(5)
    with torch.enable_grad():
        z = torch.cat([model(x, 0), model(x[:3], 1)])
    j = jacobian(z, list(model.parameters()))
    g = j.T @ z.detach().flatten() / 8
    want = torch.linalg.solve(j.T @ j / 8 + 0.1 * torch.eye(j.shape[1]).double(), g)
    opt = pb.NaturalGradient(model, Euclidean(), pb.solvers.Cholesky(0.1), gram=form)

    def loss() -> Tensor:
        return (0.5 * model(x, 0) ** 2).sum() / 8 + (0.5 * model(x[:3], 1) ** 2).sum() / 8

    assert_close(-move(model, opt, loss), want, 1e-9, "two heads, two calls")


def test_the_order_of_samples_does_not_matter() -> None:
    metric, loss = LOSSES["Categorical"]
    x, y = data()
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    computed = []
    for a, b in ((x, y), (x[order], y[order])):
        model = tanh_mlp(3, 5, 3)
        opt = pb.NaturalGradient(model, metric, pb.solvers.Cholesky(1e-2), gram="kernel")
        computed.append(move(model, opt, lambda model=model, a=a, b=b: loss(model(a), b, "mean")))
    assert_close(computed[1], computed[0], 1e-10, "the step on a shuffled batch")


def test_a_weight_is_a_repetition() -> None:
    """Weighting a sample by k is the same as having it k times (sums)."""
    x, _ = data(4)
    counts = torch.tensor([1, 3, 2, 1])
    computed = []
    for repeat in (False, True):
        model = tanh_mlp(3, 5, 3)
        if repeat:
            points = x.repeat_interleave(counts, 0)
        else:
            points = x
        if repeat:
            metric = Euclidean()
        else:
            metric = Weighted(Euclidean(), counts.double())
        opt = pb.NaturalGradient(
            model, metric, pb.solvers.Cholesky(1e-2), output=pb.optim.Outputs(reduction="sum")
        )

        def loss(model=model, points=points, repeat=repeat) -> Tensor:
            squares = 0.5 * (model(points) ** 2).sum(1)
            if repeat:
                return squares.sum()
            return (counts * squares).sum()

        computed.append(move(model, opt, loss))
    assert_close(computed[1], computed[0], 1e-10, "weights and repetitions")


def test_affine_reparametrization_leaves_the_undamped_function_step() -> None:
    """The natural gradient of w ↦ φ(Pw) moves the function as that of φ does."""
    torch.manual_seed(0)
    x = torch.randn(4, 3).double()
    t = torch.randn(4, 2).double()
    p = torch.randn(3, 3).double()
    moved = []
    for inputs in (x, x @ p):
        model = nn.Linear(3, 2, bias=False).double()
        with torch.no_grad():  # the same function in both coordinates
            model.weight.copy_(
                torch.ones(2, 3)
                if inputs is x
                else torch.ones(2, 3).double() @ torch.linalg.inv(p).T
            )
        opt = pb.GaussNewton(model, lr=0.3)
        before = model(inputs).detach()
        move(model, opt, lambda model=model, inputs=inputs: F.mse_loss(model(inputs), t))
        moved.append(model(inputs).detach() - before)
    assert_close(moved[1], moved[0], 1e-10, "the function's move in other coordinates")


def test_buffers_are_written_by_the_closure_alone() -> None:
    """Linearizing reads buffers and never writes them."""
    x, _ = data()
    for form in FORMS:
        model = Buffered(3, 3).double()
        opt = pb.NaturalGradient(model, Euclidean(), gram=form)
        move(model, opt, lambda model=model: (model(x) ** 2).mean())
        assert float(model.calls) == 1, f"{form}: {float(model.calls):.0f} forward passes counted"
