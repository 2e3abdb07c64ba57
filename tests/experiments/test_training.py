"""The training loop: what it records, that it goes on to the same bits, that any optimizer fits."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from pullback import NaturalGradient, PullbackError
from pullback.likelihoods import Categorical
from pullback.metrics import Fisher
from pullback.solvers import Cholesky
from pullback.steps import Constant
from pullback_experiments import Context, Paused, Results
from pullback_experiments.framework.store import Store
from pullback_experiments.learning import data, schedules
from pullback_experiments.learning.training import Evaluation, TrainingOptions, accuracy, fit
from tests.kfac_options import kfac_of

DATA = data.generate_pictures(shape=(6,), classes=3, samples=60).to("cpu", torch.float64)


def context(folder: Path, **arguments: Any) -> Context:
    outcome = Results(Store(folder / "r.json", {}), [0], False)
    return Context(3, torch.device("cpu"), False, folder / "item", outcome, **arguments)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def natural(m: nn.Module) -> Optimizer:
    return NaturalGradient(
        m, metric=Fisher(Categorical()), solver=Cholesky(0.1), step=Constant(0.5)
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), 0.1, momentum=0.9),
    "adam": lambda m: Adam(m.parameters(), 0.03),
    "lbfgs": lambda m: LBFGS(m.parameters(), 0.3, max_iter=2),
    "kfac": lambda m: kfac_of(
        m, 0.1, likelihood=Categorical(), damping=0.1, statistics_every=2, invert_every=4
    ),
    "natural": natural,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_is_recorded(name: str, tmp_path: Path) -> None:
    model = net()
    batch = None if name == "lbfgs" else 20
    watched: list[float] = []
    run_context = context(tmp_path, watch=lambda share, words: watched.append(share))
    epochs = 4 if name in ("kfac", "natural", "lbfgs") else 8
    options = TrainingOptions(epochs=epochs, batch=batch)
    record = fit(model, OPTIMIZERS[name](model), DATA, F.cross_entropy, run_context, options)
    assert {len(v) for v in record.values()} == {epochs + 1}
    assert record["epoch"] == list(range(epochs + 1))
    assert record["step"][-1] == epochs * (3 if batch else 1)
    assert record["train loss"][-1] < 0.6 * record["train loss"][0]
    assert record["test accuracy"][-1] > 0.8
    assert record["seconds"] == sorted(record["seconds"])
    assert watched[-1] == 1.0
    with torch.no_grad():
        assert record["test loss"][-1] == pytest.approx(
            float(F.cross_entropy(model(DATA.test_x), DATA.test_y)), rel=1e-12
        )


@pytest.mark.parametrize("name", ["sgd", "adam", "kfac"])
def test_a_paused_run_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    def run(folder: Path, deadline: float | None) -> tuple[dict, Tensor]:
        torch.manual_seed(7)
        model = net(dropout=0.3)
        torch.manual_seed(7)
        options = TrainingOptions(epochs=4, batch=20, schedule=schedules.cosine)
        record = fit(
            model,
            OPTIMIZERS[name](model),
            DATA,
            F.cross_entropy,
            context(folder, deadline=deadline),
            options,
        )
        return record, torch.cat([p.detach().flatten() for p in model.parameters()])

    want, ends = run(tmp_path / "whole", None)
    for _ in range(3):
        with pytest.raises(Paused):
            run(tmp_path / "slices", time.monotonic())
    actual, end = run(tmp_path / "slices", None)
    assert torch.equal(end, ends)
    for key in want.keys() - {"seconds"}:
        assert actual[key] == want[key], key


def test_a_lost_run_ends(tmp_path: Path) -> None:
    model = net()
    options = TrainingOptions(epochs=9)
    record = fit(
        model, SGD(model.parameters(), math.inf), DATA, F.cross_entropy, context(tmp_path), options
    )
    assert not math.isfinite(record["train loss"][-1])
    assert record["epoch"][-1] < 9


def test_augmentation_schedule_and_regression(tmp_path: Path) -> None:
    recorded: list[int] = []

    def augment(x: Tensor, generator: torch.Generator) -> Tensor:
        recorded.append(len(x))
        return x + 0.01 * torch.randn(x.shape, generator=generator, dtype=x.dtype)

    targets = data.DataSet(DATA.x, DATA.x[:, :3], DATA.test_x[:0], DATA.test_x[:0, :3])
    model = net()
    options = TrainingOptions(epochs=2, batch=25, schedule=schedules.linear, augment=augment)
    record = fit(
        model, SGD(model.parameters(), 0.1), targets, F.mse_loss, context(tmp_path), options
    )
    assert recorded == [25] * 4  # the incomplete batch is left out
    assert record["lr"] == pytest.approx([0.1, 0.1 * 0.75, 0.1 * 0.25])
    assert not any(k.startswith("test") or "accuracy" in k for k in record)


def test_half_precision_is_only_on_the_way(tmp_path: Path) -> None:
    model = net().float()
    options = TrainingOptions(epochs=1, batch=20, half=torch.bfloat16)
    record = fit(
        model,
        SGD(model.parameters(), 0.1),
        DATA.to("cpu", torch.float32),
        F.cross_entropy,
        context(tmp_path),
        options,
    )
    assert math.isfinite(record["train loss"][-1])
    assert next(model.parameters()).dtype == torch.float32


def test_evaluation_is_a_mean_over_all_samples_and_keeps_the_mode() -> None:
    model = net(dropout=0.5)
    actual = Evaluation(model, DATA, {"accuracy": accuracy}, most=7).now()
    model.eval()
    with torch.no_grad():
        want = (model(DATA.test_x).argmax(1) == DATA.test_y).double().mean()
    assert actual["test accuracy"] == pytest.approx(float(want))
    model.train()
    Evaluation(model, DATA, {"accuracy": accuracy}, most=7).now()
    assert model.training


@pytest.mark.parametrize("arguments", [{"epochs": -1}, {"epochs": 1, "batch": 0}])
def test_nothing_to_train_on_is_refused(arguments: dict[str, int], tmp_path: Path) -> None:
    model = net()
    options = TrainingOptions(**arguments)
    with pytest.raises(PullbackError, match="nothing to train on"):
        fit(model, SGD(model.parameters(), 0.1), DATA, F.cross_entropy, context(tmp_path), options)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    run_context = context(tmp_path)
    (run_context.folder() / "training.pt").write_bytes(b"junk")
    model = net()
    options = TrainingOptions(epochs=1)
    with pytest.raises(PullbackError, match="Delete it"):
        fit(model, SGD(model.parameters(), 0.1), DATA, F.cross_entropy, run_context, options)


def test_schedules() -> None:
    assert schedules.step_decay([0.5, 0.75], 0.5)(0.8) == 0.25
    assert schedules.add_warmup(schedules.constant, 0.5)(0.25) == 0.5
    assert schedules.add_warmup(schedules.linear, 0.0)(0.0) == 1.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("sgd", schedules.constant),
        ("sgd", schedules.linear),
        ("adam", schedules.linear),
        ("kfac", schedules.linear),
    ],
)
def test_captured_steps_train_as_the_others(
    name: str, schedule: schedules.Schedule, tmp_path: Path
) -> None:
    ends = []
    for graphed in (False, True):
        model = net().cuda().float()
        run_context = replace(context(tmp_path / str(graphed)), device=torch.device("cuda"))
        images = DATA.to("cuda", torch.float32)
        options = TrainingOptions(epochs=10, batch=20, schedule=schedule, graphed=graphed)
        record = fit(model, OPTIMIZERS[name](model), images, F.cross_entropy, run_context, options)
        ends.append(record["train loss"])
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=0.0)
    assert ends[1][-1] < ends[1][0]
