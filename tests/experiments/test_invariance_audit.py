"""The invariance audit as an experiment: its claims on one seed, its figure, its table."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pullback_experiments.framework import executor
from pullback_experiments.framework.experiment import Context
from pullback_experiments.invariance_audit import EXPERIMENTS
from pullback_experiments.invariance_audit import experiment as module
from pullback_experiments.invariance_audit.experiment import claims


def row(
    verdict: str, transformation: str = "per-layer affine", inputs: str = "batch"
) -> dict[str, Any]:
    return {"place": inputs, "transformation": transformation, "verdict": verdict, "direction": 0.5}


def test_claims_name_what_failed() -> None:
    actual: dict[tuple[str, str], list[Any]] = {
        (net, c.name): [row("not invariant")] for net in module.NETS for c in module.contenders(net)
    }
    checks = claims(actual)
    assert [c.holds for c in checks] == [False] * 5 + [True] * 2 + [False] * 3
    assert "0 of 2 audits" in checks[0].numbers


@pytest.mark.slow
def test_one_seed(tmp_path: Path) -> None:
    (experiment,) = EXPERIMENTS
    outcome = executor.run(
        experiment, quick=True, out=tmp_path, console=Console(file=io.StringIO())
    )
    assert all(c.holds for c in outcome.checks)
    assert {p.suffix for p in outcome.files} >= {".json", ".png"}


def test_an_item_and_the_grid() -> None:
    from pullback_experiments.invariance_audit.experiment import worst
    from pullback_experiments.invariance_audit.figure import grid

    (experiment,) = EXPERIMENTS
    item = experiment.items(True)[0]
    context = Context(0, module.torch.device("cpu"), True, Path(), None)  # pyright: ignore[reportArgumentType]
    record = item.work(context)
    verdicts = worst({("leaky", item.key[1]): record["rows"]}, "leaky")
    assert str(verdicts["SGD", "neuron permutation"][0]) == "exact"  # pyright: ignore[reportOptionalSubscript]
    assert len(grid(verdicts).axes) == 1


@pytest.mark.slow
def test_slices_forget_scales_on_the_model_and_not_among_parameters() -> None:
    """Twins without a symmetry of scales are left out."""
    (experiment,) = EXPERIMENTS
    item = next(i for i in experiment.items(True) if i.key == ("leaky", "SliceSGD"))
    context = Context(1, module.torch.device("cpu"), True, Path(), None)  # pyright: ignore[reportArgumentType]
    rows = item.work(context)["rows"]
    for comparison in ("batch", "probes", "parameters"):
        assert {r["transformation"]: r["verdict"] for r in rows if r["place"] == comparison} == {
            "input rotation": "exact",
            "input whitening": "not invariant",
            "neuron rescaling": "not invariant" if comparison == "parameters" else "exact",
            "neuron permutation": "exact",
        }
