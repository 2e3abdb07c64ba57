"""Checks, verdicts and tables."""

import numpy as np
import pytest

from pullback import PullbackError
from pullback_experiments import Check, Table, make_checks, seed_range
from pullback_experiments.framework.check import conclude


def test_a_check_says_when_it_differs_from_the_record() -> None:
    assert "unlike" in str(Check("c", True, "n", recorded=False))
    assert "unlike" not in str(Check("c", False, "n", recorded=False))


@pytest.mark.parametrize(
    ("outcomes", "outcome"),
    [
        ((True, True), "reproduced"),
        ((True, False), "differs"),
        ((False, False), "not reproduced"),
    ],
)
def test_verdicts(outcomes: tuple[bool, ...], outcome: str) -> None:
    checks = [Check(f"c{i}", h, "n") for i, h in enumerate(outcomes)]
    ours = Check("ours", False, "n", of_paper=False)
    verdict = conclude([*checks, ours])
    assert verdict is not None
    assert verdict.outcome == outcome
    assert "ours" not in verdict.why
    assert conclude([ours]) is None


def test_what_an_array_says_is_a_plain_boolean() -> None:
    assert Check("c", np.float64(1) < 2, "n").holds is True  # pyright: ignore[reportArgumentType]


def test_records_are_beside_the_claims() -> None:
    checks = make_checks([("a", True, "1"), ("b", False, "2")], [True, True], ours={1})
    assert [c.agrees for c in checks] == [True, False]
    assert [c.of_paper for c in checks] == [True, False]
    with pytest.raises(ValueError, match="zip"):
        make_checks([("a", True, "1")], [True, True])


def test_a_table_shows_brackets_as_they_are() -> None:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as capture:
        console.print(Table(["a"], [["[bold]x[/bold]"], [None]], "T"))
    assert "[bold]x[/bold]" in capture.get()
    assert "–" in capture.get()


@pytest.mark.parametrize("width", [20, 30, 60])
def test_a_table_loses_no_number_where_the_terminal_is_narrow(width: int) -> None:
    from rich.console import Console

    console = Console(width=width)
    names = ["network", "SGD", "K-FAC, every step"]
    with console.capture() as capture:
        console.print(Table(names, [["784-1024-1024-10", 0.000123, 230.5]], "ms per step"))
    assert max(map(len, capture.get().splitlines())) <= width
    for word in ("784-1024-1024-10", "0.000123", "230", "ms per step"):
        assert word in capture.get()


@pytest.mark.parametrize("text", ["", "a", "1-2-3", "-1", "5-2", "²"])
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(PullbackError, match="seeds"):
        seed_range(text)
