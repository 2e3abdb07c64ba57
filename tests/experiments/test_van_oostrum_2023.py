"""The examples of van Oostrum et al. by hand, and the theorems' oracle against another one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pullback.testing import assert_close
from pullback_experiments import van_oostrum_2023
from pullback_experiments.framework import executor
from pullback_experiments.framework.experiment import Context
from pullback_experiments.framework.store import Results, Store
from pullback_experiments.van_oostrum_2023 import examples, theorems
from pullback_experiments.van_oostrum_2023.theorems import DAMPED, INVERSES, RandomModel

(OURS,) = van_oostrum_2023.EXPERIMENTS


@pytest.fixture
def context(tmp_path: Path) -> Context:
    outcome = Results(Store(tmp_path / "r.json", {}), [3], False)
    return Context(3, torch.device("cpu"), False, tmp_path / "place", outcome)


def test_example_1_splits_the_gradient(context: Context) -> None:
    actual = examples.compare_rotated_maps(context)
    x, y = actual["gradient"]
    assert actual["moves"] == [[x, 0.0], [0.0, y]]
    assert actual["ranks"] == [1, 1, 2]


def test_example_2_has_two_moves_at_one_point(context: Context) -> None:
    actual = examples.compare_at_crossing(context)
    assert actual["tangents"] == [[2.0, 1.0], [-2.0, 1.0]]
    assert actual["grams"] == [5.0, 5.0]
    # (w·∂)∂/5 by hand for w = (1, 0.6)
    want = torch.tensor([[1.04, 0.52], [0.56, -0.28]])
    assert_close(torch.tensor(actual["moves"]), want, 1e-6, "(52) and (56)")
    assert actual["printed"][1] == 1.0
    assert abs(actual["right"][0]) + abs(actual["right"][1]) < 1e-15


def test_a3_has_the_papers_numbers(context: Context) -> None:
    parameters = examples.parameters(context)
    want = torch.tensor([3, 3, 4.8, 1.2], dtype=torch.float64)
    tensor = torch.tensor([*parameters["y_xi"], *parameters["y_theta"]], dtype=torch.float64)
    assert_close(tensor, want, 1e-14, "y_Ξ and y_Θ")
    moves = torch.tensor([[6.0, 0.0], [6.0, 0.0]])
    assert_close(torch.tensor(parameters["moves"]), moves, 1e-6, "one move")


def test_the_projection_is_that_of_the_dense_gram(context: Context) -> None:
    scene = RandomModel(context)
    xi = scene.xi.clone().requires_grad_()
    j = torch.autograd.functional.jacobian(scene.phi, xi)
    assert isinstance(j, Tensor)
    z = scene.phi(scene.xi).requires_grad_()
    (slope,) = torch.autograd.grad(RandomModel.loss(z), z)
    gram = j.T @ scene.metric @ j
    move = j @ torch.linalg.pinv(gram, rtol=1e-10, hermitian=True) @ j.T @ slope
    assert int(torch.linalg.matrix_rank(gram, rtol=1e-10)) == theorems.SIZES.inner
    assert_close(scene.project_gradient(), move, 1e-8, "Π grad L")
    f = torch.autograd.functional.jacobian(scene.f, scene.theta)
    assert isinstance(f, Tensor)
    assert float(torch.linalg.svdvals(f)[-1]) > 0.1


def test_theorems_hold_but_for_damping(context: Context) -> None:
    actual = theorems.theorems(context)
    for name in INVERSES:
        exact = name != DAMPED
        assert (actual["projection"][name] < 1e-10) == exact
        assert (actual["model"][name] < 1e-10) == exact
        assert actual["space"][name] > 0.01
    assert actual["cubic"] == 0.0
    distance = theorems.steps([1e-4, 1e-5], context)["apart"]
    assert 9 < distance["Moore–Penrose"][0] / distance["Moore–Penrose"][1] < 11


@pytest.mark.slow
def test_all_checks_are_as_recorded_and_one_printed_number_is_wrong(tmp_path: Path) -> None:
    outcome = executor.run(OURS, True, [5], tmp_path)
    assert outcome.status == 0
    assert [c.claim for c in outcome.checks if not c.holds] == [
        "the curve crosses itself at ξ₂ = π/2, as printed in A.2"
    ]
    assert [c.claim for c in outcome.checks if not c.of_paper] == [
        "with damping the move depends on coordinates, however small the step"
    ]
    assert outcome.verdict is not None
    assert outcome.verdict.outcome == "differs"
