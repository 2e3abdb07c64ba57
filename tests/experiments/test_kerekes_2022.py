"""The reproduction of Kerekes et al. (2022): its parts against plain oracles, and quick runs."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.func import jacfwd

from pullback import PullbackError, flow
from pullback.likelihoods import Bernoulli
from pullback.linear import DiagonalNetwork
from pullback_experiments import kerekes_2022, registry
from pullback_experiments.framework import executor
from pullback_experiments.kerekes_2022 import margins
from pullback_experiments.kerekes_2022.common import (
    angle,
    expected_accuracy,
    flat_start,
    population_descent,
    sample_descent,
    sparse,
)
from pullback_experiments.kerekes_2022.factorization import (
    Norm,
    Observed,
    descend,
    effective_rank,
    product,
)
from pullback_experiments.kerekes_2022.integrators import Explicit, Jacobian, Stiff, march, relative
from pullback_experiments.kerekes_2022.margins import EuclideanFlow, Signed
from pullback_experiments.kerekes_2022.planar import points
from pullback_experiments.kerekes_2022.solutions import l1_max_margin, l2_max_margin

DOUBLE = torch.float64
CPU = torch.device("cpu")
EXPERIMENTS = {e.name.removeprefix("kerekes-2022-"): e for e in kerekes_2022.EXPERIMENTS}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def separable(samples: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = draw(samples, dim, seed=seed)
    return x, (x @ draw(dim, seed=seed + 1)).sign()


def test_the_stiff_integrator_has_order_two_and_ignores_what_has_settled() -> None:
    rates = torch.tensor([[-1.0, -1e6]], dtype=DOUBLE)
    none = rates.new_zeros(1, 2, 0)
    stiff = Stiff(
        lambda y: rates * (y - 1), lambda y: (rates * (y - 1), Jacobian(rates, none, none))
    )
    errors = []
    for count in (20, 40):
        y = torch.tensor([[2.0, 5.0]], dtype=DOUBLE)
        for _ in range(count):
            y, _ = stiff.step(y, torch.full((1,), 1 / count, dtype=DOUBLE))
        errors.append(abs(float(y[0, 0]) - 1 - math.exp(-1)))
        assert abs(float(y[0, 1]) - 1) < 1e-6
    assert 3 < errors[0] / errors[1] < 5


def test_the_explicit_integrator_has_order_five() -> None:
    explicit = Explicit(lambda y: torch.stack([y[:, 1], -y[:, 0]], 1), relative(0.0, 1.0))
    errors = []
    estimates = []
    for count in (10, 20):
        y = torch.tensor([[0.0, 1.0]], dtype=DOUBLE)
        h = torch.full((1,), 1 / count, dtype=DOUBLE)
        estimates.append(float(explicit.step(y, h)[1]))
        for _ in range(count):
            y, _ = explicit.step(y, h)
        errors.append(abs(float(y[0, 0]) - math.sin(1)))
    assert 25 < errors[0] / errors[1] < 40
    assert 25 < estimates[0] / estimates[1] < 40


def test_a_march_stops_each_system_by_itself_and_says_which_are_late() -> None:
    rates = torch.tensor([[1.0], [2.0], [0.0]], dtype=DOUBLE)
    pair = Explicit(lambda y: rates * y, relative(1e-8))
    start = torch.ones(3, 1, dtype=DOUBLE)
    recorded: list[Tensor] = []
    y, has_failed = march(
        pair, start, lambda y: y[:, 0].log(), 0.3, watch=recorded.append, max_steps=200
    )
    assert has_failed.tolist() == [False, False, True]
    assert recorded
    assert y[:, 0].log().tolist() == pytest.approx([0.3, 0.3, 0.0], abs=1.3e-3)
    assert bool((y[:2, 0].log() >= 0.3).all())
    _, still = march(pair, start, lambda y: y[:, 0].log(), 0.3, max_steps=2)
    assert still.all()


def test_a_step_that_is_not_a_number_is_refused_until_it_is_too_short() -> None:
    pair = Explicit(lambda y: y * math.nan)
    y, has_failed = march(pair, torch.ones(1, 2, dtype=DOUBLE), lambda y: y[:, 0], 2.0)
    assert has_failed.all()
    assert bool((y == 1).all())


@pytest.mark.parametrize("rank", [1, 2, 5, 9])
@pytest.mark.parametrize("step", [0.3, 1.0])
def test_implicit_steps_are_solved_whatever_the_rank(rank: int, step: float) -> None:
    a = draw(2, 6)
    left = draw(2, 6, rank, seed=1)
    right = draw(2, 6, rank, seed=2)
    a[0, 1] = 1.0  # 1 − c a vanishes for c = 1
    c = torch.tensor([[step], [0.5]], dtype=DOUBLE)
    whole = torch.eye(6, dtype=DOUBLE) - c[..., None] * (a.diag_embed() + left @ right.mT)
    r = draw(2, 6, seed=3)
    truth = torch.linalg.solve(whole, r)
    torch.testing.assert_close(Jacobian(a, left, right).solver(c)(r), truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_flows_jacobian_is_autograds(depth: int) -> None:
    data = Signed.of([separable(7, 3), separable(4, 3, 5)])
    actual = EuclideanFlow(data, [depth, depth], 0.3)
    v = draw(2, 3, seed=9)
    whole = jacfwd(actual.velocity)(v)
    assert isinstance(whole, Tensor)
    jacobian = actual.velocity_and_jacobian(v)[1].dense()
    for i in range(2):  # problems that share a batch do not touch
        torch.testing.assert_close(jacobian[i], whole[i, :, i], rtol=1e-10, atol=1e-13)
    assert float(whole[0, :, 1].abs().max()) == 0
    torch.testing.assert_close(actual.velocity_and_jacobian(v)[0], actual.velocity(v))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_rescaled_flow_agrees_with_plain_small_steps(depth: int) -> None:
    x, y = separable(6, 4)
    fast = EuclideanFlow(Signed.of([(x, y)]), depth, 0.5, rtol=1e-6)
    v = fast.run(1.5)
    level = float(fast.level(v))
    beta = fast.beta(v)[0]
    model = flat_start(4, depth, 0.5, CPU)
    factors = torch.stack([w.detach() for w in model.factors])
    rate = 5e-3
    for _ in range(200_000):
        b = factors.prod(0)
        u = y * (x @ b)
        if -math.log(float(F.softplus(-u).mean())) >= level:
            break
        g = (y * torch.sigmoid(-u)) @ x / len(x)
        others = [torch.cat([factors[:k], factors[k + 1 :]]).prod(0) for k in range(depth)]
        factors = factors + rate * torch.stack(others) * g
    assert angle(factors.prod(0), beta) < 0.1
    assert float((factors.prod(0) - beta).norm() / beta.norm()) < 1e-2


@pytest.mark.parametrize("depth", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_rescaled_flow_agrees_with_the_librarys(depth: int) -> None:
    x, y = separable(6, 4, 3)
    fast = EuclideanFlow(Signed.of([(x, y)]), depth, 0.5, rtol=1e-6)
    v = fast.run(3.0)
    loss = math.exp(-float(fast.level(v)))
    model = flat_start(4, depth, 0.5, CPU)
    plain = flow.integrate(
        model,
        flow.Supervised(x, (1 + y) / 2, Bernoulli()),
        t=(0, 1e4),
        kind="euclidean",
        events=[flow.Event(lambda s: math.log(loss) - math.log(s.loss))],
    )
    assert plain.status == "event"
    beta = plain.flat().view(depth, -1).prod(0)
    assert float((beta - fast.beta(v)[0]).norm() / beta.norm()) < 1e-3


def test_the_flow_reaches_the_margins() -> None:
    x, y = separable(12, 5)
    flows = EuclideanFlow(Signed.of([(x, y)] * 2), [1, 2], [1.0, 1e-3], rtol=1e-4)
    beta = flows.beta(flows.run(3e4))
    assert angle(beta[0], l2_max_margin(x, y).beta) < 0.02
    actual = beta[1] / float((y * (x @ beta[1])).min())
    truth = l1_max_margin(x, y)
    assert float(actual.abs().sum()) < 1.02 * truth.norm  # as slow as 1/log(β/α²)


@pytest.mark.parametrize("depth", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_samples_of_no_weight_do_not_bend_the_path(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = separable(40, 25)
    fast = EuclideanFlow(Signed.of([(x, y)]), depth, 0.1, rtol=1e-4)
    v = fast.run(300.0)
    assert (
        fast.velocity_and_jacobian(v)[1].left.shape[2] < 25
    )  # so that steps are solved by Woodbury's identity
    monkeypatch.setattr(margins, "LIMITS", margins.FlowLimits(least_weight=-1.0))
    whole = fast.run(300.0)
    assert fast.velocity_and_jacobian(whole)[1].left.shape[2] == 42
    assert angle(fast.beta(v)[0], fast.beta(whole)[0]) < 1e-3


def test_errors_are_measured_where_the_logits_are() -> None:
    """One sample moves alone, or all alike: by the definition, through autograd's Jacobian."""
    x, y = separable(9, 4)
    actual = EuclideanFlow(Signed.of([(x, y)]), 3, 0.2, rtol=1e9, logits=0.1)
    v = draw(1, 4, seed=2)
    error = 1e-3 * draw(1, 4, seed=3)
    beta = v * (v.square() + 0.04)
    u = y * (x @ beta[0])
    off = y * (x @ ((3 * v.square() + 0.04) * error)[0])
    weights = torch.sigmoid(-u)
    mean = (weights * off).sum() / weights.sum()
    level = -F.softplus(-u).mean().log()
    assert bool((weights > 1e-5 * weights.max()).all())
    distance = float((off - mean).abs().max())
    value = float(mean.abs() / (1 + level.clamp(min=0)))
    size = float(actual.size(v, v, error))
    assert size == pytest.approx(max(distance, value) / 0.1, rel=1e-9)
    entries = EuclideanFlow(Signed.of([(x, y)]), 3, 0.2, rtol=1e-6, logits=1e9)
    truth = float((error.abs() / (1e-6 * (v.abs() + 0.02))).max())
    assert float(entries.size(v, v, error)) == pytest.approx(truth, rel=1e-9)


@pytest.mark.slow
def test_flows_with_small_margins_arrive_and_the_loss_falls_all_the_way() -> None:
    """‖β‖ is a hundred times the margin: if errors count by the size of v alone, weights jump."""
    x, y = sparse(300, 20, 4, torch.Generator().manual_seed(2), CPU)
    ends = []
    for rtol, logits in ((1e-2, 0.05), (3e-5, 0.005)):
        actual = EuclideanFlow(Signed.of([(x, y)]), 4, 0.1, rtol=rtol, logits=logits)
        recorded: list[float] = []
        v = actual.run(1000.0, None, lambda level, levels=recorded: levels.append(float(level)))
        assert recorded == sorted(recorded)
        assert float(actual.level(v)) == pytest.approx(1000, abs=1.1)
        ends.append(actual.beta(v)[0])
        assert float((y * (x @ ends[-1])).min() / ends[-1].norm()) < 0.02
    assert angle(*ends) < 1e-4


def test_a_flow_that_cannot_arrive_says_so() -> None:
    x = torch.ones(2, 1, dtype=DOUBLE)
    actual = EuclideanFlow(Signed.of([(x, torch.tensor([1.0, -1.0], dtype=DOUBLE))]), 1, 1.0)
    with pytest.raises(PullbackError, match="did not arrive"):
        actual.run(5.0)


@pytest.mark.slow
def test_a_flow_that_ends_early_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = EuclideanFlow.run

    def stuck(self: EuclideanFlow, level: float, *arguments: Any) -> Tensor:
        if level > 2 and self.data.rows.shape[1] == 6 and float(self.others) == 1:
            raise PullbackError("The flow did not arrive", "it was told so", "None")
        return whole(self, level, *arguments)

    monkeypatch.setattr(EuclideanFlow, "run", stuck)
    small = EXPERIMENTS["figure4"].smoke()
    outcome = executor.run(small, True, [0], tmp_path, Console(file=io.StringIO()))
    assert outcome.status == 0
    record = json.loads((tmp_path / "kerekes-2022-figure4-quick.json").read_text())
    euclidean = next(r["record"] for r in record["runs"] if r["key"] == ["EGD"])
    assert euclidean["arrived"] == [[5, 5], [2, 5]]
    first_level, last_level = (level[1][0] for level in euclidean["path"])
    assert first_level == last_level
    assert "1 flow" in record["summary"]["tables"][0]["title"]


def test_data_sets_of_several_sizes_do_not_mix() -> None:
    one = separable(9, 3)
    two = separable(4, 3, 7)
    joint_flow = EuclideanFlow(Signed.of([one, two]), 2, 0.2)
    separate = EuclideanFlow(Signed.of([two]), 2, 0.2)
    v = draw(2, 3)
    torch.testing.assert_close(joint_flow.velocity(v)[1:], separate.velocity(v[1:]))
    truth = -F.softplus(-two[1] * (two[0] @ separate.beta(v[1:])[0])).mean().log()
    torch.testing.assert_close(joint_flow.level(v)[1], truth)


def test_losses_of_any_size() -> None:
    data = Signed(torch.eye(2, dtype=DOUBLE)[None], torch.tensor([2.0], dtype=DOUBLE))
    actual = EuclideanFlow(data, 1, 1.0)
    for size in (0.0, 19.0, 21.0, 600.0):
        level = float(actual.level(torch.full((1, 2), size, dtype=DOUBLE)))
        assert level == pytest.approx(-math.log(math.log1p(math.exp(-size))), rel=1e-12)
    assert float(actual.level(torch.full((1, 2), 1e6, dtype=DOUBLE))) == pytest.approx(1e6)
    assert torch.isfinite(actual.velocity(torch.full((1, 2), 1e6, dtype=DOUBLE))).all()


def test_accuracy_is_that_of_many_samples() -> None:
    beta = draw(20, seed=4)
    x, y = sparse(200_000, 20, 5, torch.Generator().manual_seed(0), CPU)
    counted = float(((x @ beta).sign() == y).double().mean())
    assert abs(float(expected_accuracy(beta, 5)) - counted) < 4e-3
    truth = torch.zeros(20, dtype=DOUBLE)
    truth[:5] = 2.0
    assert float(expected_accuracy(truth, 5)) == pytest.approx(1.0)


def test_points_have_the_margins_they_are_made_for() -> None:
    for seed in range(5):
        x, y = points(seed, CPU)
        z = y[:, None] * x
        assert float(z[:, 0].min()) > 0.5  # the axis separates
        assert 1 / l2_max_margin(x, y).norm > 1.5 * float(z[:, 0].min())  # another does better
        assert float(z[:, 1].min()) < 0  # the other axis does not


def test_natural_steps_move_beta_alike_at_any_depth() -> None:
    x, y = separable(12, 3)
    for steps in (sample_descent, population_descent):
        ends = [
            list(steps(flat_start(3, depth, 1.0, CPU), x, y, 1e-3, 60))[-1] for depth in (1, 2, 4)
        ]
        assert float((ends[1] - ends[0]).norm() / ends[0].norm()) < 5e-3
        assert float((ends[2] - ends[0]).norm() / ends[0].norm()) < 5e-3


@pytest.mark.slow
def test_factor_steps_agree_with_small_ones_and_complete() -> None:
    truth = draw(8, 1) @ draw(1, 8, seed=1)
    data = Observed.of(truth, [40], torch.Generator().manual_seed(0))
    start = [0.05 * draw(1, 8, 8, seed=s) for s in (2, 3)]
    one = product(descend(start, data, steps=400))
    two = product(descend(start, data, steps=2000, share=0.1))
    assert float((one - two).norm() / two.norm()) < 1e-2
    assert float(data.training(one)) < 1e-2
    assert float(data.error(one)) < 0.1
    assert float(effective_rank(one)) < 1.3


def test_norms_by_power_iteration() -> None:
    a = draw(3, 6, 6)
    norm = Norm()
    for _ in range(60):
        norm(a)
    torch.testing.assert_close(norm(a), torch.linalg.matrix_norm(a, 2), rtol=1e-6, atol=0)
    assert not Norm()(torch.zeros(2, 3, 3, dtype=DOUBLE)).any()


def test_effective_rank_of_known_spectra() -> None:
    eye = torch.eye(5, dtype=DOUBLE)
    assert float(effective_rank(eye)) == pytest.approx(5.0)
    assert float(effective_rank(eye[:, :1] @ eye[:1])) == pytest.approx(1.0)


def test_the_start_has_no_sign() -> None:
    model = flat_start(3, 4, 0.2, CPU)
    assert isinstance(model, DiagonalNetwork)
    assert not model.beta.any()
    assert flat_start(3, 1, 0.2, CPU).beta.shape == (3,)


def test_the_registry_knows_them() -> None:
    names = {e.name for e in kerekes_2022.EXPERIMENTS}
    assert names == set(registry.FOLDERS["kerekes_2022"])
    for experiment in kerekes_2022.EXPERIMENTS:
        json.dumps([experiment.config(True), experiment.config(False)])


def run(name: str, folder: Path) -> None:
    experiment = EXPERIMENTS[name]
    outcome = executor.run(experiment, True, [0], folder, Console(file=io.StringIO()))
    assert outcome.status == 0, [str(c) for c in outcome.checks if not c.agrees]
    assert all(path.stat().st_size for path in outcome.files)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure2", "figure4", "figure5", "figure6", "theorems"])
def test_quick_runs(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)
