"""Every metric × form × solver × model agrees with the dense float64 oracle."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

import pullback as pb
from pullback.testing import Oracle, assert_close
from tests.laws.cases import Built, MetricCase, ModelCase, Probe, SolverCase
from tests.laws.table import FORMS, METRICS, MODELS, SOLVERS
from tests.pairs import covering, each_once

DAMPINGS = (3e-2, 1.0)
TOLERANCE = 1e-8
BY_NAME = {m.name: m for m in MODELS}


def name_of(case: ModelCase | MetricCase | SolverCase | str) -> str:
    return case if isinstance(case, str) else case.name


@cache
def built(model: ModelCase) -> Built:
    return model.make()


@cache
def truth(model: ModelCase, metric: MetricCase) -> Oracle:
    return built(model).oracle(metric)


def fitting_metrics(model: ModelCase) -> list[MetricCase]:
    case = built(model)
    z = case.value().detach()
    return [m for m in METRICS if m.fits(z, case.first)]


def check(model: ModelCase, metric: MetricCase, form: str, solver: SolverCase) -> pb.StepInfo:
    case = built(model)
    want = truth(model, metric)
    probe = Probe(*DAMPINGS)
    info = case.step(
        metric.metric, metric.loss, solver=solver.make(DAMPINGS[0]), step=probe, gram=form
    )
    assert info.gram == form
    assert want.gradient is not None
    assert_close(probe.gradient, want.gradient, 1e-12, "the gradient is p.grad")
    for damping, direction in zip(DAMPINGS, probe.directions, strict=True):
        assert direction.damping == damping
        assert_close(direction.x, want.solve(damping), TOLERANCE, f"(G + {damping:g})⁻¹g")
    return info


FORMS_AND_SOLVERS: list[tuple[str, SolverCase]] = []
for _solver in SOLVERS:
    FORMS_AND_SOLVERS += [(form, _solver) for form in _solver.forms]

_FEW_MODELS = (BY_NAME["mlp"], BY_NAME["mlp few parameters"])
METRIC_PRODUCT = [
    (model, metric, *pair)
    for model, metric, pair in product(_FEW_MODELS, METRICS, FORMS_AND_SOLVERS)
]


@pytest.mark.parametrize(
    ("model", "metric", "form", "solver"), covering(METRIC_PRODUCT), ids=name_of
)
def test_every_metric_form_and_solver(
    model: ModelCase, metric: MetricCase, form: str, solver: SolverCase
) -> None:
    check(model, metric, form, solver)


MODEL_PRODUCT = [(model, *pair) for model, pair in product(MODELS, FORMS_AND_SOLVERS)]


@pytest.mark.parametrize(("model", "form", "solver"), covering(MODEL_PRODUCT), ids=name_of)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_every_model_form_and_solver(model: ModelCase, form: str, solver: SolverCase) -> None:
    """The metrics take turns, so that the whole product is sampled evenly."""
    metrics = fitting_metrics(model)
    turn = 3 * MODELS.index(model) + SOLVERS.index(solver) + 2 * FORMS.index(form)
    check(model, metrics[turn % len(metrics)], form, solver)


@pytest.mark.parametrize(
    ("metric", "form"), each_once(METRICS, ["rows", "kernel", "matrix_free"]), ids=name_of
)
def test_the_solve_starts_from_r_where_it_is_known(metric: MetricCase, form: str) -> None:
    """p.grad holds nothing but the recorded loss here, so r must be confirmed, not dropped."""
    info = check(BY_NAME["mlp"], metric, form, SOLVERS[0])
    assert info.whitened


def test_a_regularizer_is_honoured_and_r_is_not_used() -> None:
    """p.grad is the truth: g no longer comes from the outputs alone."""
    case = MODELS[0].make()
    metric = METRICS[0]

    def loss(z: torch.Tensor) -> torch.Tensor:
        decay = sum((p**2).sum() for p in case.model.parameters())
        return metric.loss(z) + 0.05 * decay

    want = case.oracle(MetricCase("", None, metric.matrix, loss))
    for form in FORMS:
        probe = Probe(0.1)
        info = case.step(metric.metric, loss, solver=pb.solvers.Cholesky(), step=probe, gram=form)
        assert not info.whitened
        assert_close(probe.directions[0].x, want.solve(0.1), TOLERANCE, f"regularized, {form}")


# --- undamped: the minimum-norm solution ----------------------------------------------------


def repeat_samples() -> Built:
    """p > n, and every sample stands in the batch twice: A has half its rows' rank."""
    case = BY_NAME["mlp"].make()
    case.args = (case.args[0].repeat(2, 1),)
    return case


def redundant() -> Built:
    """p < n, with a direction of parameters that no output feels."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1)).double()
    return Built(model, (torch.randn(9, 2).double(),), {})


UNDAMPED = [
    pytest.param(BY_NAME["mlp"].make, "Euclidean", None, id="p > n, full rank"),
    pytest.param(BY_NAME["mlp few parameters"].make, "Euclidean", None, id="p < n, full rank"),
    pytest.param(BY_NAME["mlp"].make, "Categorical", 4, id="p > n, a metric of half rank"),
    pytest.param(repeat_samples, "Euclidean", 8, id="p > n, repeated samples"),
    pytest.param(repeat_samples, "Bernoulli", 8, id="p > n, repeated samples, Fisher"),
    pytest.param(redundant, "Euclidean", 3, id="p < n, rank deficient"),
    pytest.param(redundant, "Poisson", 3, id="p < n, rank deficient, Fisher"),
]


@pytest.mark.parametrize(("make", "metric", "rank"), UNDAMPED)
@pytest.mark.parametrize("form", FORMS)
def test_undamped_is_the_minimum_norm_solution(make, metric: str, rank, form: str) -> None:
    case = make()
    chosen = next(m for m in METRICS if m.name == metric)
    want = case.oracle(chosen)
    sigma = torch.linalg.svdvals(want.rows)
    if rank is None:
        rank = min(want.rows.shape)
    condition = float(sigma[0] / sigma[rank - 1])
    assert condition < 2000, f"the case is ill conditioned ({condition:.1e}): choose another"
    probe = Probe(None)
    info = case.step(
        chosen.metric, chosen.loss, solver=pb.solvers.PseudoInverse(), step=probe, gram=form
    )
    assert info.rank == rank
    x = probe.directions[0].x
    pinv = want.solve(0.0)
    assert_close(x, pinv, TOLERANCE, f"G⁺g at condition {condition:.0f}")
    # minimum norm, said without a pseudo-inverse: x solves G x = g and has no null component
    assert want.gradient is not None
    assert_close(want.gram @ x, want.gradient, TOLERANCE, "G x = g")
    _, _, vt = torch.linalg.svd(want.rows)
    null = vt[rank:] @ x
    assert float(null.norm()) <= 1e-7 * float(x.norm()), f"null component {float(null.norm()):.1e}"


def test_sketched_needs_rows_and_says_so() -> None:
    case = MODELS[0].make()
    metric = METRICS[0]
    with pytest.raises(pb.PullbackError, match="needs the rows"):
        case.step(metric.metric, metric.loss, solver=pb.solvers.Sketched(), gram="dense")


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("name", "form"), each_once(["mlp", "conv2d", "attention", "tied embedding"], FORMS)
)
def test_single_precision_follows_the_oracle(name: str, form: str) -> None:
    """The same step in float32, against the float64 oracle."""
    case = BY_NAME[name].make()
    metric = next(m for m in METRICS if m.name == "Categorical")
    want = case.oracle(metric).solve(0.1)
    case.model.float()
    case.args = tuple(a.float() if a.is_floating_point() else a for a in case.args)
    probe = Probe(0.1)
    case.step(metric.metric, metric.loss, solver=pb.solvers.Cholesky(), step=probe, gram=form)
    assert probe.directions[0].x.dtype == torch.float32
    assert_close(probe.directions[0].x, want, 1e-4, "float32")
