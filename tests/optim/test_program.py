"""Recorded functions: the same bits as the function, and none where a record would not do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from pullback.maps import OperatorMap, Scheme
from pullback.optim import NaturalGradient, Objective, Squares
from pullback.optim import terms as module
from pullback.optim.objective import ObjectiveProblem
from pullback.optim.program import record
from pullback.solvers import PseudoInverse
from pullback.steps import TargetRatio

N = 11
X = torch.linspace(-1, 1, N).double()[None, :, None]
Q = torch.full((N,), 1 / N).double()
A, B = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0)).double()


def test_a_record_has_the_same_bits_elsewhere() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        constant = torch.sin(X[0, :4, 0]).clone()
        return ((a @ b).tanh() * constant + a.clone().sum(0)).square().sum()

    program = record(function, [A, B])
    assert program is not None
    for scale in (1.0, -0.3, 1e3):
        assert torch.equal(program(scale * A, B), function(scale * A, B))


def test_constants_are_computed_once() -> None:
    calls = []

    def function(a: Tensor) -> Tensor:
        calls.append(1)
        return (a * torch.sin(B).exp()).sum()

    program = record(function, [A])
    assert program is not None
    names = [str(n.target) for n in program.__self__.graph.nodes]  # pyright: ignore[reportFunctionMemberAccess]
    assert not any("sin" in n or "exp" in n for n in names)
    before = len(calls)
    program(A)
    assert len(calls) == before


def test_a_function_of_constants_alone() -> None:
    program = record(lambda a: B.sum(), [A])
    assert program is not None
    assert torch.equal(program(2 * A), B.sum())


@pytest.mark.parametrize(
    "function",
    [
        lambda a: a.sum() if a.sum() > 0 else a.square().sum(),
        lambda a: (a * torch.rand_like(a)).sum(),
        lambda a: a.clone().mul_(2).sum(),
        lambda a: torch.from_numpy(a.numpy() * 2).sum(),
        lambda a: (a * float(a.numpy().sum())).sum(),
        lambda a: a.no_such_method(),
    ],
    ids=["branches", "draws", "writes", "leaves torch", "reads a number", "fails"],
)
def test_no_record_of_what_is_more_than_its_operations(function) -> None:
    assert record(function, [A]) is None


class Case:
    """½ mean |weight·(u'' + u³ − 1)|², with a weight that may change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.weight, self.calls = 1.0, 0
        self.params = dict(self.net.named_parameters())
        map = OperatorMap(self._apply, X, Scheme.of([(0, 0)]), self._operator, Q)
        self.objective = Objective([Squares(map)])

    def _apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.net, params, (x,))

    def _operator(self, channels, params: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        u = channels[0, 0, :, 0]
        return self.weight * (channels[2, 0, :, 0] + u**3 - 1)[:, None]

    def problem(self) -> ObjectiveProblem:
        problem = ObjectiveProblem(self.params, self.objective, "mean")  # pyright: ignore[reportArgumentType]
        assert problem.evaluate() == ""
        return problem

    def check(self) -> int:
        """Trial losses against the objective; how often Python was run for them."""
        problem = self.problem()
        moves = 0.1 * torch.randn(6, problem.space.size).double()

        def place(params, move: Tensor) -> dict[str, Tensor]:
            pieces = problem.space.split(move)
            return {n: p.detach() - pieces[n] for n, p in params.items()}

        want = torch.stack([self.objective.loss(place(self.params, m)) for m in moves]).detach()
        before = self.calls
        got = problem.losses(moves, place)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=0)
        return self.calls - before


def test_trials_are_recorded_once_they_are_many() -> None:
    case = Case()
    spent = [case.check() for _ in range(6)]
    assert spent[0] == 6
    assert spent[-1] == 0


def test_a_record_follows_the_terms() -> None:
    case = Case()
    for weight in (1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5):
        case.weight = float(weight)
        last = case.check()
    assert last == 6  # it changed too often
    assert case.objective._records == module._RECORDS


def test_steps_are_the_same_with_and_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[float]:
        case = Case()
        optimizer = NaturalGradient(case.net, solver=PseudoInverse(), step=TargetRatio())
        return [optimizer.step(objective=case.objective).loss for _ in range(12)]

    with_record = run()
    monkeypatch.setattr(module, "_OFTEN", 10**9)
    assert run() == with_record
