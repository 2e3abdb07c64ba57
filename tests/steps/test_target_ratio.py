"""TargetRatio: the largest radius whose running-minimum ratio exceeds the target."""

from __future__ import annotations

import pytest
import torch

import pullback as pb
from pullback.solvers import Cholesky
from pullback.steps import Move, TargetRatio
from tests.pairs import all_pairs
from tests.steps.helpers import Bowl, bowl


def trials(problem: Bowl, rule: TargetRatio, radius: float) -> tuple[list[float], list[float]]:
    """Radii and ratios, worked out with a bisection and a dense solve."""
    a = problem.a
    w = problem.w
    lr = problem.lr
    g = torch.func.grad(problem.loss)(w)
    gram = a.T @ a
    eye = torch.eye(len(w)).double()
    values, vectors = torch.linalg.eigh(gram)
    shares = vectors.T @ g
    exponents = torch.linspace(-1, 1, rule.radii, dtype=torch.float64)
    radii = (radius * rule.window**exponents).tolist()
    ratios = []
    for r in radii:

        def too_long(damping: float, r: float = r) -> bool:
            return float((shares / (values + damping)).norm()) > r

        low = high = 0.0
        if too_long(0.0):
            low = 1e-14
            high = 1e8
            for _ in range(120):
                middle = (low * high) ** 0.5
                low, high = (middle, high) if too_long(middle) else (low, middle)
        x = torch.linalg.solve(gram + high * eye, g)
        m = lr * x
        predicted = g @ m - 0.5 * m @ gram @ m
        ratios.append(float((problem.loss(w) - problem.loss(w - m)) / predicted))
    return radii, ratios


@pytest.mark.parametrize(
    ("strength", "radius", "lr"), all_pairs([0.01, 0.1, 1.0, 100.0], [0.05, 0.5, 8.0], [1.0, 0.5])
)
def test_it_takes_the_largest_good_radius(strength: float, radius: float, lr: float) -> None:
    problem = bowl(seed=3, lr=lr)
    problem.extra = lambda w: strength * w.pow(4).sum()
    rule = TargetRatio(target=0.3, radii=16, window=4.0, radius=radius)
    radii, ratios = trials(problem, rule, radius)
    running = torch.tensor(ratios).cummin(0).values
    assert float((running - 0.3).abs().min()) > 1e-6, "a tie: choose another case"
    count = int((running > 0.3).sum())
    move = rule.take(problem.local())
    assert problem.trials in (4, 5)  # of 16, by bisection
    assert move.accepted == (count > 0)
    if count == 0:
        assert problem.state["radius"] == pytest.approx(radius / 4.0)
        assert "radius" in move.reason
        return
    want = radii[count - 1]
    g = torch.func.grad(problem.loss)(problem.w)
    longest = float(torch.linalg.solve(problem.a.T @ problem.a, g).norm())
    assert float(move.direction.norm()) == pytest.approx(min(want, longest), rel=1e-8)
    assert problem.state["radius"] == pytest.approx(min(want, longest), rel=1e-8)
    assert move.size == 1.0
    assert move.loss == pytest.approx(
        float(problem.loss(problem.w - lr * move.direction)), rel=1e-12
    )


def test_all_branches_were_met() -> None:
    branches = set()
    for strength in (0.01, 0.1, 1.0, 100.0):
        for radius in (0.05, 0.5, 8.0):
            problem = bowl(seed=3)
            problem.extra = lambda w, s=strength: s * w.pow(4).sum()
            rule = TargetRatio(target=0.3, radii=16, window=4.0)
            running = torch.tensor(trials(problem, rule, radius)[1]).cummin(0).values
            count = int((running > 0.3).sum())
            branches.add("all" if count == 16 else "none" if count == 0 else "some")
    assert branches == {"all", "none", "some"}


@pytest.mark.parametrize("last", range(8))
def test_bisection_finds_the_last_good_radius(last: int) -> None:
    problem = bowl()
    local = problem.local()
    true = local.losses
    radii = 0.1 * 2.0 ** torch.linspace(-1, 1, 8, dtype=torch.float64)

    def losses(moves: torch.Tensor) -> torch.Tensor:
        return torch.where(moves.norm(dim=1) > radii[last] + 1e-6, 1e9, true(moves))

    local.losses = losses
    move = TargetRatio(radii=8, window=2.0, radius=0.1).take(local)
    assert float(move.direction.norm()) == pytest.approx(float(radii[last]), rel=1e-8)
    assert move.loss == pytest.approx(float(problem.loss(problem.w - move.direction)))


def test_trials_that_are_not_finite_count_as_bad() -> None:
    problem = bowl()
    local = problem.local()
    local.losses = lambda moves: torch.full((len(moves),), torch.nan).double()
    move = TargetRatio(radius=1.0, window=3.0).take(local)
    assert not move.accepted
    assert problem.state["radius"] == pytest.approx(1 / 3)


def test_the_full_step_sets_the_radius_to_its_own_length() -> None:
    problem = bowl()
    move = TargetRatio(radius=1e6).take(problem.local())
    g = torch.func.grad(problem.loss)(problem.w)
    full = torch.linalg.solve(problem.a.T @ problem.a, g)
    assert move.accepted
    assert move.solution.damping == 0.0
    assert problem.state["radius"] == pytest.approx(float(full.norm()), rel=1e-9)


def test_without_a_path_or_one_learning_rate_it_says_what_it_needs() -> None:
    with pytest.raises(pb.PullbackError, match="PseudoInverse"):
        TargetRatio().take(bowl(solver=Cholesky()).local())
    local = bowl().local()
    local.lr = None
    with pytest.raises(pb.PullbackError, match="same lr"):
        TargetRatio().take(local)


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_gram_without_directions_is_a_rejection(value: float) -> None:
    a = torch.full((2, 3), value, dtype=torch.float64)
    problem = Bowl(a, torch.ones(2).double(), torch.ones(3).double())
    move = TargetRatio().take(problem.local())
    assert not move.accepted
    assert "damping" in move.reason


@pytest.mark.parametrize("last", [-1, 0, 3, 7])
def test_all_radii_at_once_give_the_move_of_the_bisection(
    last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU all radii are tried together; here both searches run on a CPU."""
    radii = 0.1 * 2.0 ** torch.linspace(-1, 1, 8, dtype=torch.float64)
    longest = float(radii[last]) + 1e-6 if last >= 0 else 0.0

    def take() -> tuple[Move, int]:
        problem = bowl()
        local = problem.local()
        true = local.losses
        local.losses = lambda moves: torch.where(moves.norm(dim=1) > longest, 1e9, true(moves))
        return TargetRatio(radii=8, window=2.0, radius=0.1).take(local), problem.trials

    bisected, _ = take()
    monkeypatch.setattr(TargetRatio, "_bisect", TargetRatio._try_all)
    move, trials = take()
    assert trials == 8
    assert move.accepted == bisected.accepted == (last >= 0)
    torch.testing.assert_close(move.direction, bisected.direction)
    assert move.loss == bisected.loss
