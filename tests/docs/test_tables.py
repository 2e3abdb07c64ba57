"""The tables of the README and the docs say what the committed records say."""

import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest

from pullback_experiments import tables as table
from pullback_experiments.tables.numbers import RESULTS, record, times


def test_every_table_agrees_with_its_record() -> None:
    names = [page.relative_to(table.REPOSITORY).as_posix() for page in table.stale()]
    assert not names, f"run `python -m pullback_experiments.tables`: {names}"


def test_every_table_is_shown_somewhere() -> None:
    text = "".join(page.read_text("utf-8") for page in table.pages())
    assert set(re.findall(r"<!-- table (?!of:)(\S+) -->", text)) == set(table.TABLES)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_record_names_its_environment(path: Path) -> None:
    contents = json.loads(path.read_text("utf-8"))
    if "environment" in contents:
        assert "torch" in contents["environment"] or "jax" in contents["environment"]
    else:
        assert all(one["torch"] and one["device"] for one in contents["environments"])


def test_a_table_is_written_between_its_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.TABLES, "x", lambda: [["a", "b"], ["1", "2"]])
    text = "before\n<!-- table x -->\nold\n<!-- end -->\nafter\n"
    new = "before\n<!-- table x -->\n| a | b |\n|---|---|\n| 1 | 2 |\n<!-- end -->\nafter\n"
    assert table.fill_tables(text) == new
    assert table.fill_tables(new) == new


@pytest.mark.parametrize(
    ("value", "shown"), [(1.058, "1.06×"), (6.89, "6.9×"), (31.01, "31×"), (None, "–")]
)
def test_ratios(value: float | None, shown: str) -> None:
    assert times(value) == shown


def said(page: str) -> str:
    return " ".join((table.REPOSITORY / page).read_text("utf-8").split())


def test_numbers_in_the_limits() -> None:
    rows = table.TABLES["costs"]()[1:]
    exact = [float(row[4].rstrip("×")) for row in rows if row[0] == "exact, sample space"]
    assert f"{min(exact):.0f} to {max(exact):.0f} times SGD" in said("docs/choosing.md")


def between(cells: Iterable[str], digits: int) -> str:
    """Return the smallest and the largest of the ratios, as the pages write them."""
    low, *_, high = sorted(float(cell.rstrip("×")) for cell in cells)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def columns(rows: list[list[str]], *numbers: int) -> list[str]:
    """Return the cells of these columns."""
    return [row[number] for row, number in product(rows, numbers)]


def test_costs_of_exact_steps_that_a_newcomer_reads() -> None:
    costs = table.TABLES["costs"]()[1:]
    mlps = [row for row in costs if row[0] == "exact, sample space" and "MLP" in row[1]]
    solve = next(row[4].rstrip("×") for row in costs if row[0] == "exact, pseudo-inverse")
    mlp = between(columns(mlps, 4), 1)
    for text in (said("docs/start.md"), said("README.md")):
        assert f"| {mlp} of SGD's |" in text
        assert f"| {solve} of Adam's |" in text
    assert f"| {between(columns(mlps, 5), 1)} of SGD's |" in said("docs/start.md")


def test_costs_of_kfac_that_a_newcomer_reads() -> None:
    """The costs are those of the default rule of these networks, `Spectral`."""
    rules = [row for row in table.TABLES["rules"]() if row[0] == "`Spectral`"]
    kfac = columns(rules, 1, 3)
    start = said("docs/start.md")
    most = list(kfac)
    resnet, vit, *_ = record("race-images")["summary"]["tables"]
    text, *_ = record("race-text")["summary"]["tables"]
    for race in (resnet, vit, text):
        pace = {row[0]: float(row[6]) for row in race["rows"]}
        most.append(f"{pace['K-FAC'] / pace['AdamW']}×")
    small = [str(row["time of a step over Adam's"]) for row in record("defaults-cuda")["rows"]]
    assert f"| {between(kfac, 1)} of AdamW's |" in start
    assert f"| {between(columns(rules, 2, 4), 1)} of AdamW's |" in start
    tasks = [str(task["step over Adam's"]) for task in record("small-tasks-cpu")["summary"]]
    assert f"| {between(small, 0)} of Adam's on a GPU, {between(tasks, 1)} on a CPU |" in start
    assert f"| {between(most, 1)} of AdamW's, small nets {between(small, 0)} |" in said("README.md")


def test_the_readme_is_short() -> None:
    assert 600 <= len((table.REPOSITORY / "README.md").read_text("utf-8").split()) <= 800


def test_the_docs_are_short() -> None:
    """Without the reference, whose pages are made from docstrings, and tables made from records."""
    pages = [page for page in table.pages() if page.parent.name != "reference"]
    words = 0
    for page in pages[1:]:
        text = table.BLOCK.sub("", page.read_text("utf-8"))
        words += sum(re.search(r"\w", word) is not None for word in text.split())
    assert words <= 33_400
    assert len((table.REPOSITORY / "CHANGELOG.md").read_text("utf-8").split()) <= 2_100
