"""Curves: medians over seeds, thinned, as data that leaves no tag, for every experiment."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from pullback_experiments import registry
from pullback_experiments.commands.report import charts
from pullback_experiments.framework import store
from pullback_experiments.framework.curves import Chart, Line, Series, averages, over_seeds

WITH_CURVES = (
    "bai-2024-projection", "bai-2024-slices-figure2", "bai-2024-slices-figure2-quick",
    "bai-2024-slices-rescaled", "bai-2024-sobolev-digits", "kerekes-2022-figure2",
    "kerekes-2022-figure4", "kerekes-2022-figure5", "kerekes-2022-figure6", "kerekes-2022-support",
    "luk-grosse-2018", "yin-2024-shallow", "yin-2024-deep", "yin-2024-poisson",
)  # fmt: skip


def test_medians_and_quartiles_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    runs = [{"step": [0, 1, 2], "loss": rng.random(3).tolist()} for _ in range(6)]
    series = over_seeds("a", runs, "loss", ["step"])
    assert series is not None
    line = series.lines["step"]
    low, middle, high = np.quantile([r["loss"] for r in runs], (0.25, 0.5, 0.75), axis=0)
    assert line.x == [0, 1, 2]
    for actual, expected in ((line.low, low), (line.y, middle), (line.high, high)):
        np.testing.assert_allclose(actual, expected)


def test_a_run_that_ends_keeps_its_value_and_one_that_is_lost_counts_as_infinite() -> None:
    runs = [
        {"step": [0, 1], "seconds": [0.0, 0.1], "loss": [4.0, 2.0]},
        {"step": [0, 1, 5], "seconds": [0.0, 0.2, 1.0], "loss": [4.0, math.nan, math.nan]},
        {"step": [0, 5], "seconds": [0.0, 2.0], "loss": [4.0, 1.0]},
    ]
    series = over_seeds("a", runs, "loss", ["step", "seconds"])
    assert series is not None
    assert series.lines["step"].y == [4.0, 4.0, 2.0]
    assert series.lines["seconds"].x[0] == 0
    assert series.lines["seconds"].x[-1] == pytest.approx(2.0)
    assert over_seeds("a", [], "loss", ["step"]) is None


def test_means_stay_within_the_runs() -> None:
    line = averages([[0, 1]] * 3, [[0.0, 1.0], [0.0, 1.0], [3.0, math.inf]])
    assert line.y[0] == 1.0
    assert line.low[0] == 0.0
    assert math.isnan(line.y[1])


def test_a_long_line_keeps_its_ends_its_extremes_and_its_beginning() -> None:
    y: list[float | None] = [1 / (i + 1) for i in range(50_000)]
    y[31_234] = 99.0
    y[777] = None
    thinned = charts.thin_curve(y)
    assert len(thinned) <= 320
    assert {0, 1, 2, 49_999, 31_234} <= set(thinned)
    assert sum(i < 1000 for i in thinned) > 60


def test_data_are_json_that_ends_no_tag() -> None:
    evil = "</script><!--<script>&amp;\u2028"
    line = Line([0.0, 1.0], [math.nan, 1.23456789], [math.inf, 1.0], [1.0, 2.0])
    chart = Chart(evil, evil, [Series(evil, {"step": line}), None], note=evil)
    html = charts.render_charts([chart])
    inside = html.split('<script type="application/json">')[1].split("</script>")[0]
    assert not set("<>&") & set(inside)
    data = json.loads(inside)
    assert data["title"] == evil
    assert data["series"][0]["lines"]["step"]["y"] == [None, 1.23457]
    assert html.count("</script>") == 1
    assert "<!--" not in html


def test_uneven_lines_are_refused_and_empty_charts_are_not_drawn() -> None:
    with pytest.raises(ValueError, match="2 x, 1 y"):
        charts.render_charts([Chart("a", "b", [Series("c", {"step": Line([0, 1], [2])})])])
    assert charts.render_charts([]) == ""
    assert (
        charts.render_charts([Chart("a", "b", [None, Series("c", {"step": Line([], [])})])]) == ""
    )


def test_more_series_than_colors_are_dashed() -> None:
    series = [Series(str(i), {"x": Line([0, 1], [1, 2])}) for i in range(10)]
    data = charts.as_data(Chart("a", "b", series))
    assert [s["color"] for s in data["series"]] == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]
    assert [s["style"] for s in data["series"]][-3:] == ["solid", "dashed", "dashed"]


@pytest.mark.parametrize("name", WITH_CURVES)
def test_committed_records_have_curves(name: str, records: Path) -> None:
    path = records / f"{name}.json"
    curves = charts.curves(path, store.read(path))
    assert curves.note == ""
    assert curves.charts
    for chart in curves.charts:
        data = charts.as_data(chart)
        assert data["axes"]
        assert len(charts.embed_json(data)) < 150_000
    assert all(chart.drawable_series() for chart in curves.charts) or "figure2" in name


def test_error_against_time_and_steps(records: Path) -> None:
    path = records / "yin-2024-deep.json"
    for chart in charts.curves(path, store.read(path)).charts:
        assert chart.axis_names() == {"steps": "steps", "seconds": "CPU seconds"}
        assert all(set(s.lines) == {"steps", "seconds"} for s in chart.drawable_series())


def test_curves_that_cannot_be_drawn_say_why(records: Path, tmp_path: Path) -> None:
    path = tmp_path / "yin-2024-deep.json"
    state = json.loads((records / path.name).read_text())

    def note(**changes: object) -> str:
        path.write_text(json.dumps({**state, **changes}))
        return charts.curves(path, store.read(path)).note

    assert note() == ""
    assert "layers differ" in note(config={**state["config"], "layers": [1]})
    runs = [{**run, "record": {}} for run in state["runs"]]
    assert "changed by hand" in note(runs=runs)
    shutil.copy(path, tmp_path / "copy.json")
    path = tmp_path / "copy.json"
    assert "are called yin-2024-deep" in note()
    assert note(about={**state["about"], "name": "of others"}) == ""


def test_arrays_that_are_gone_are_missed_and_named(records: Path, tmp_path: Path) -> None:
    shutil.copy(records / "kerekes-2022-figure6.json", tmp_path)
    path = tmp_path / "kerekes-2022-figure6.json"
    assert "No such file" in charts.curves(path, store.read(path)).note


def test_all_names_are_known_to_the_registry() -> None:
    assert {n.removesuffix("-quick") for n in WITH_CURVES} <= set(registry.names())
