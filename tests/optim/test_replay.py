"""The replayed forward pass is the recorded one, or the step is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import pullback as pb
from pullback.testing import assert_close, jacobian
from tests.pairs import all_pairs

DOUBLE = torch.float64
FISHER = pb.metrics.Fisher(pb.likelihoods.Categorical())


def closure_of(opt, model, x, y):
    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def data(samples: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(samples, 3, dtype=DOUBLE), torch.randint(0, 3, (samples,))


def want(model: nn.Module, z: Tensor, y: Tensor, damping: float, decay: float = 0.0) -> Tensor:
    params = [p for p in model.parameters() if p.requires_grad]
    j = jacobian(z, params)
    p = torch.softmax(z.detach(), -1)
    m = torch.block_diag(*(torch.diag(q) - torch.outer(q, q) for q in p)) / len(z)
    g = torch.cat([t.flatten() for t in torch.autograd.grad(F.cross_entropy(z, y), params)])
    g = g + decay * torch.cat([p.detach().flatten() for p in params])
    return torch.linalg.solve(j.T @ m @ j + damping * torch.eye(len(g), dtype=g.dtype), g)


@pytest.mark.parametrize("solver", [pb.solvers.Cholesky(0.1), pb.solvers.ConjugateGradient(0.1)])
def test_a_module_used_twice_keeps_its_parameters(solver) -> None:
    shared = nn.Linear(3, 3, dtype=DOUBLE)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    x, y = data()
    opt = pb.NaturalGradient(model, FISHER, solver)
    for _ in range(2):
        target = want(model, model(x), y, 0.1)
        assert_close(opt.direction(closure_of(opt, model, x, y)).x, target, 1e-8, "direction")
        opt.step(closure_of(opt, model, x, y))
        assert isinstance(shared.weight, nn.Parameter)
        assert shared.weight.requires_grad


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 3, dtype=DOUBLE)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * (torch.rand(x.shape, generator=self.generator) > 0.5))


class KeepsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 3, dtype=DOUBLE)
        self.h = torch.zeros(6, 3, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x, self.h)
        self.h = h.detach()
        return h


@pytest.mark.parametrize("model", [OwnGenerator(), KeepsState()])
def test_a_pass_that_cannot_be_repeated_is_refused(model: nn.Module) -> None:
    x, y = data()
    opt = pb.NaturalGradient(model, FISHER)
    with pytest.raises(pb.PullbackError, match="cannot be repeated"):
        opt.step(closure_of(opt, model, x, y))


def test_a_mode_changed_inside_the_closure_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    x, y = data()
    opt = pb.NaturalGradient(model, FISHER)

    def closure() -> Tensor:
        model.train()
        loss = closure_of(opt, model, x, y)()
        model.eval()
        return loss

    with pytest.raises(pb.PullbackError, match="cannot be repeated"):
        opt.step(closure)


def test_a_random_parametrization_draws_once() -> None:
    class Drop(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return F.dropout(w, 0.3, True)

    model = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.4), nn.Linear(6, 3)).double()
    x, y = data()
    parametrize.register_parametrization(model[0], "weight", Drop())
    state = torch.get_rng_state()
    target = want(model, model(x), y, 0.1)
    torch.set_rng_state(state)
    opt = pb.NaturalGradient(model, FISHER, pb.solvers.Cholesky(0.1))
    assert_close(opt.direction(closure_of(opt, model, x, y)).x, target, 1e-8, "direction")


def test_a_model_that_wants_its_whole_batch() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3, dtype=DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            assert len(x) == 6
            return x @ self.w

    model = Picky()
    x, y = data()
    opt = pb.NaturalGradient(model, FISHER, pb.solvers.Cholesky(0.1))
    direction = opt.direction(closure_of(opt, model, x, y)).x
    assert_close(direction, want(model, model(x), y, 0.1), 1e-8, "direction")


def test_matrix_free_through_a_transformer_layer_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dtype=DOUBLE)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3, dtype=DOUBLE)).eval()
    x = torch.randn(3, 3, 4, dtype=DOUBLE)
    y = torch.randint(0, 3, (3,))
    opt = pb.NaturalGradient(model, FISHER, pb.solvers.ConjugateGradient(0.1))
    direction = opt.direction(closure_of(opt, model, x, y)).x
    assert_close(direction, want(model, model(x), y, 0.1), 1e-7, "direction")


def test_no_way_to_push_a_tangent_is_said() -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 3))
    _, y = data()
    opt = pb.NaturalGradient(model, FISHER, pb.solvers.ConjugateGradient(0.1))
    with pytest.raises(pb.PullbackError, match="J v cannot be computed"):
        opt.step(closure_of(opt, model, torch.randint(0, 5, (6, 2)), y))


@pytest.mark.parametrize("form", ["rows", "kernel", "dense"])
def test_a_branch_taken_later_is_noticed(form: str) -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 4, dtype=DOUBLE)
            self.out = nn.Linear(4, 3, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x).tanh()
            return self.out(h + F.linear(x, self.a.weight) if x.sum() > 0 else h)

    model = Branch()
    x, y = data()
    opt = pb.NaturalGradient(model, FISHER, pb.solvers.Cholesky(0.1), gram=form)
    for shift in (-5.0, 5.0):
        moved = x - x.mean() + shift
        direction = opt.direction(closure_of(opt, model, moved, y)).x
        assert_close(direction, want(model, model(moved), y, 0.1), 1e-8, f"shift {shift}")


SOLVERS = pb.solvers.PseudoInverse(), pb.solvers.ConjugateGradient(1e-3), pb.solvers.Cholesky(1e-3)


@pytest.mark.parametrize(
    ("gap", "solver", "form", "decay"),
    all_pairs([20.0, 60.0], SOLVERS, ["rows", "kernel"], [0.0, 0.01]),
)
def test_a_sample_that_is_certain_and_wrong(gap: float, solver, form: str, decay: float) -> None:
    """r is e^(gap/2) there, and the row it meets e^(−gap/2)."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3, dtype=DOUBLE)
    x = torch.randn(4, 3, dtype=DOUBLE)
    y = torch.tensor([0, 1, 2, 1])
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        x[0] = 0.0
        model.weight[1, 0] = gap
        x[0, 0] = 1.0
        x[1:, 0] = 0.0
    opt = pb.NaturalGradient(model, FISHER, solver, gram=form, lr=0.0)
    directions = {}

    class Look(pb.steps.Constant):
        def take(self, local: pb.steps.Local) -> pb.steps.Move:
            directions["solve"] = local.direction(1e-3).x
            if (path := local.path()) is not None:
                directions["path"] = path.at(torch.tensor(1e-3, dtype=DOUBLE))
            return super().take(local)

    def closure() -> Tensor:
        loss = closure_of(opt, model, x, y)()
        penalty = 0.5 * decay * sum(p.square().sum() for p in model.parameters())
        penalty.backward()
        return loss + penalty

    opt.rule = Look(0.0)
    opt.step(closure)
    target = want(model, model(x), y, 1e-3, decay)
    for name, direction in directions.items():
        assert_close(direction, target, 1e-6, name)


def test_the_proofs_hold_under_autocast() -> None:
    """A second use of a weight is seen in bfloat16 too."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + F.linear(x.roll(1, -1), 1.5 * self.a.weight)

    torch.manual_seed(0)
    model = Twice()
    x = torch.randn(6, 8)
    y = torch.randint(0, 8, (6,))
    opt = pb.NaturalGradient(model, FISHER, pb.solvers.Cholesky(0.1), gram="kernel", lr=0.0)

    def closure() -> Tensor:
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x)
        loss = F.cross_entropy(z.float(), y)
        loss.backward()
        return loss

    info = opt.step(closure)
    reasons = {c.name: c.reason for c in info.coverage}
    assert reasons["a.weight"] == "it is also used outside its layer"
    assert info.whitened


def test_relative_damping_does_not_see_a_repeated_batch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = data(150)
    solver = pb.solvers.ConjugateGradient(pb.solvers.Relative(0.1), tol=1e-13)
    opt = pb.NaturalGradient(model, FISHER, solver)
    once = opt.direction(closure_of(opt, model, x, y)).x
    twice = opt.direction(closure_of(opt, model, torch.cat([x, x]), torch.cat([y, y]))).x
    assert_close(twice, once, 1e-8, "direction")
