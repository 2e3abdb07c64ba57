"""The page in a real browser: what a reader sees, clicks and types."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pullback_experiments.commands import report
from pullback_experiments.framework import executor

from ..small import Small
from .browser import Browser, Page

EVIL = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>\"'"
CHART = "#yin-2024-shallow .chart:first-child"
PLOT = f"{CHART} .plot > svg"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, records: Path) -> Path:
    """A page with curves, figures, tables, hostile words and a file that is none of ours."""
    out = tmp_path_factory.mktemp("results")
    shutil.copy(records / "yin-2024-shallow.json", out)
    shutil.copy(records / "kerekes-2022-figure2.json", out)
    executor.run(Small(drawn=True), out=out)
    state: dict[str, Any] = json.loads((out / "small.json").read_text())
    for name in ("name", "claim", "figure", "about", "paper"):
        state["about"][name] = EVIL
    rows = [
        ["a", "1.5e-3 ± 2e-4"],
        ["b", "12"],
        ["c", "–"],
        ["d", "2e-5"],
        ["e", "−3"],
        [EVIL, "inf"],
    ]
    table = {"title": EVIL, "columns": ["name", EVIL], "rows": rows}
    state["summary"] |= {"tables": [table], "verdict": {"outcome": "differs", "why": EVIL}}
    state["environments"][0][EVIL] = EVIL
    (out / "hostile.json").write_text(json.dumps(state))
    (out / "foreign.json").write_text("[1]")
    written, left_out = report.write(out)
    assert len(left_out) == 1
    return written


@pytest.fixture
def page(browser: Browser, path: Path) -> Iterator[Page]:
    opened = browser.open(path)
    drawn(opened, CHART)
    yield opened
    assert opened.said == []
    assert [u for u in opened.requested_urls if not u.startswith(path.as_uri())] == []


def drawn(page: Page, chart: str) -> None:
    """Scroll to a chart, which is when it is drawn."""
    page.middle(chart)
    page.wait_for(f"document.querySelector('{chart} .line')")


def curve(page: Page, number: int = 0) -> str:
    return page(f"document.querySelectorAll('{PLOT} .line')[{number}].getAttribute('d')")


def is_pressed(page: Page, name: str) -> str:
    return page(f"document.querySelector('{CHART} [aria-label=\"{name}\"]').ariaPressed")


def column(page: Page, table: str, number: int) -> list[str]:
    cells = f"document.querySelectorAll('{table} tbody tr td:nth-child({number})')"
    return page(f"[...{cells}].map(c => c.textContent)")


def test_the_scales_switch(page: Page) -> None:
    first = curve(page)
    assert is_pressed(page, "Logarithmic y axis") == "true"
    page.click(f'{CHART} [aria-label="Logarithmic y axis"]')
    assert is_pressed(page, "Logarithmic y axis") == "false"
    assert curve(page) != first
    page.click(f'{CHART} [aria-label="Logarithmic y axis"]')
    assert curve(page) == first
    page.click(f'{CHART} [aria-label="Logarithmic x axis"]')
    # step 0 has a place on a linear axis
    assert curve(page).count("L") == first.count("L") + 1


def test_steps_and_seconds_switch(page: Page) -> None:
    first = curve(page)
    name = f"document.querySelector('{PLOT} .xname').textContent"
    assert page(name) == "steps"
    page.click(f'{CHART} [aria-label="Against CPU seconds"]')
    assert page(name) == "CPU seconds"
    assert curve(page) != first
    page.click(f'{CHART} [aria-label="Against steps"]')
    assert curve(page) == first


def test_wheel_drag_and_double_click(page: Page) -> None:
    first = curve(page)
    page.wheel(PLOT, -240)  # without the focus the page scrolls, and says so
    assert curve(page) == first
    page.click(PLOT)
    page.wheel(PLOT, -240)
    near = curve(page)
    assert near != first
    page.drag(PLOT, (0.4, 0.3), (0.7, 0.6))
    assert curve(page) != near
    page.click(PLOT, count=2)
    assert curve(page) == first
    page.drag(PLOT, (0.4, 0.3), (0.7, 0.6))
    boxed = curve(page)
    page.click(f'{CHART} [aria-label="Zoom out"]')
    assert curve(page) != boxed
    page.click(f'{CHART} [aria-label="Show all"]')
    assert curve(page) == first


def test_keys_zoom_move_and_read(page: Page) -> None:
    first = curve(page)
    page(f"document.querySelector('{PLOT}').focus()")
    page.key("+", 3)
    near = curve(page)
    assert near != first
    page.key("ArrowRight")
    moved = curve(page)
    assert moved != near
    page.key("ArrowLeft")
    assert curve(page) == near
    page.key("-")
    page.key("0")
    assert curve(page) == first
    page.key("y")
    assert is_pressed(page, "Logarithmic y axis") == "false"
    page.key("t")
    assert is_pressed(page, "Against CPU seconds") == "true"
    page.key("t")
    page.key(".", 2)
    spoken = page(f"document.querySelector('{CHART} [aria-live]').textContent")
    assert spoken.startswith("steps: ")
    assert "Adam" in spoken
    page.key("Escape")
    assert page(f"document.querySelector('{CHART} .readout').hidden")


def test_values_follow_the_pointer(page: Page) -> None:
    page.mouse("mouseMoved", page.middle(PLOT))
    page.settle()
    readout = page(f"document.querySelector('{CHART} .readout').innerText")
    assert readout.startswith("steps: ")
    assert "NGD-OGA" in readout
    page.mouse("mouseMoved", (2, 2))
    page.settle()
    assert page(f"document.querySelector('{CHART} .readout').hidden")


def test_the_legend_hides_and_singles_out(page: Page) -> None:
    count = page(f"document.querySelectorAll('{PLOT} .line').length")
    button = f"{CHART} .legend li:nth-child(2) button"
    page.click(button)
    assert page(f"document.querySelector('{button}').ariaPressed") == "false"
    assert page(f"document.querySelectorAll('{PLOT} .line').length") == count - 1
    page.click(button)
    page.click(button, modifiers=8)
    assert page(f"document.querySelectorAll('{PLOT} .line').length") == 1
    page.click(button, modifiers=8)
    assert page(f"document.querySelectorAll('{PLOT} .line').length") == count
    page(f"document.querySelector('{button}').focus()")
    page.key("Enter")
    assert page(f"document.querySelectorAll('{PLOT} .line').length") == count - 1
    for chart_number in range(1, count + 1):  # an empty chart is drawn, too
        if chart_number != 2:
            page.click(f"{CHART} .legend li:nth-child({chart_number}) button")
    assert page(f"document.querySelectorAll('{PLOT} .line').length") == 0


def test_tables_sort_by_numbers_and_words(page: Page) -> None:
    table = "#hostile table"
    names = column(page, table, 1)
    head = f"{table} th:nth-child(2)"
    page.click(f"{head} button")
    assert page(f"document.querySelector('{head}').ariaSort") == "ascending"
    assert column(page, table, 2) == ["−3", "2e-5", "1.5e-3 ± 2e-4", "12", "inf", "–"]
    page(f"document.querySelector('{head} button').focus()")
    page.key("Enter")
    assert page(f"document.querySelector('{head}').ariaSort") == "descending"
    assert column(page, table, 2) == ["inf", "12", "1.5e-3 ± 2e-4", "2e-5", "−3", "–"]
    page.key(" ")
    assert page(f"document.querySelector('{head}').ariaSort") is None
    assert column(page, table, 1) == names
    page.click(f"{table} th:nth-child(1) button")
    assert column(page, table, 1)[-1] == "e"
    assert page(f"document.querySelector('{head}').ariaSort") is None
    page.click(".overview th:nth-child(7) button")
    times = "[...document.querySelectorAll('.overview td:nth-child(7)')].map(c => +c.dataset.value)"
    actual = page(times)
    assert actual == sorted(actual)


def test_hostile_words_are_words(page: Page) -> None:
    assert page("window.harmed") is None
    assert page("document.querySelectorAll('main script:not([type])').length") == 0
    assert page("document.querySelectorAll('img[src=x]').length") == 0
    assert page("document.querySelector('#hostile .claim').textContent") == EVIL
    assert page("document.querySelector('#hostile dt:last-of-type').textContent") == EVIL


def test_filters_and_search(page: Page) -> None:
    shown = "[...document.querySelectorAll('article')].filter(a => a.offsetParent).map(a => a.id)"
    rows = "[...document.querySelectorAll('tr[data-for]')].filter(a => a.offsetParent).length"
    everything = page(shown)
    assert len(everything) == 4
    page.click('.filters [data-verdict="differs"]')
    assert page(shown) == ["small"]
    assert page(rows) == 1
    page.click('.filters [data-verdict="differs"]')
    page("document.querySelector('.filters input').focus()")
    for letter in "separator":
        page.key(letter)
    assert page(shown) == ["kerekes-2022-figure2"]
    assert page("document.querySelector('.filters output').textContent") == "1 of 4 shown"
    page("location.hash = '#small'")  # an address shows what a filter hides
    page.wait_for(f"{shown}.length === 4")
    assert page("document.querySelector('#small').getBoundingClientRect().top") < 200
    page(
        "(() => { const s = document.querySelector('select'); s.selectedIndex = 2;"
        "s.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    assert len(page(shown)) == 1


def test_light_and_dark(page: Page) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page(paper)
    page.prefer("dark")
    dark = page(paper)
    assert dark != light
    line = f"getComputedStyle(document.querySelector('{PLOT} .line')).stroke"
    assert page(line) == "rgb(240, 130, 58)"
    page.click(".theme")  # light, whatever the system says
    assert page(paper) == light
    page.click(".theme")
    page.prefer("light")
    assert page(paper) == dark
    page.click(".theme")
    assert page(paper) == light


def test_a_figure_fills_the_screen_and_zooms(page: Page) -> None:
    page("document.querySelector('#small figure').focus()")
    page.key("Enter")
    assert page("document.querySelector('dialog').open")
    assert page("document.querySelector('dialog img').naturalWidth") > 100
    page.key("+", 2)
    assert "scale(1.96)" in page("document.querySelector('dialog img').style.transform")
    page.key("ArrowDown")
    page.wheel("dialog .stage", -100)
    assert "scale(1.96)" not in page("document.querySelector('dialog img').style.transform")
    page.key("0")
    assert "scale(1)" in page("document.querySelector('dialog img').style.transform")
    page.key("Escape")
    page.wait_for("!document.querySelector('dialog')")
    assert page("document.activeElement.tagName") == "FIGURE"


def test_the_command_is_copied(page: Page, path: Path) -> None:
    page.click("#small .command button")
    page.wait_for("document.querySelector('#small .command button').textContent === 'Copied'")
    words = page("document.querySelector('#small .command code').textContent")
    assert words == f"pullback run small --out {path.parent}"


def test_everything_is_reached_by_tab_and_shows_its_focus(page: Page) -> None:
    drawn(page, "#kerekes-2022-figure2 .chart")
    page("document.querySelector('#kerekes-2022-figure2 .anchor').focus()")
    recorded = []
    for _ in range(14):
        page.key("Tab")
        recorded.append(page("document.activeElement.tagName"))
        assert page("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert {"svg", "BUTTON", "DIV"} <= set(recorded)  # the chart, its buttons, a table


@pytest.mark.parametrize("width", [320, 360])
@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_does_not_scroll_sideways(
    browser: Browser, path: Path, width: int, dark: bool
) -> None:
    page = browser.open(path, width=width, height=700, dark=dark)
    drawn(page, CHART)
    assert page("document.documentElement.scrollWidth") == width
    assert page(f"document.querySelector('{PLOT}').clientWidth") > 0.75 * width
    assert page.said == []


def test_two_fingers_zoom(browser: Browser, path: Path) -> None:
    page = browser.open(path, width=360, height=700)
    drawn(page, CHART)
    first = curve(page)
    page.pinch(PLOT, 0.2, 0.6)
    assert curve(page) != first
    page.click(f'{CHART} [aria-label="Show all"]')
    assert curve(page) == first
    assert page("getComputedStyle(document.querySelector('.plot svg')).touchAction") == "pan-y"
    assert page.said == []


def test_without_scripts_all_is_readable(browser: Browser, path: Path) -> None:
    page = browser.open(path, scripts=False)
    text = page("document.body.innerText")
    assert "faster <i>indeed</i>" in text
    assert "The curves are drawn by a script." in text
    assert page("document.querySelectorAll('figure img').length") >= 2
    assert page("document.querySelector('.filters').offsetParent") is None
    assert page("document.querySelector('.chart').offsetParent") is None
    assert page("document.querySelector('#small figure').offsetParent !== null")


def test_an_address_leads_to_an_experiment(browser: Browser, path: Path) -> None:
    page = browser.open(path, anchor="#yin-2024-shallow")
    page.wait_for(f"document.querySelector('{PLOT} .line')")
    top = page("document.querySelector('#yin-2024-shallow').getBoundingClientRect().top")
    assert 0 <= top < 200
    assert page.said == []


def test_paper_has_all_curves_and_figures(browser: Browser, path: Path) -> None:
    page = browser.open(path)
    printed = page.call("Page.printToPDF", printBackground=True)["data"]
    assert len(printed) > 50_000
    undrawn = (
        "[...document.querySelectorAll('[data-chart]')].filter(c => !c.querySelector('.line'))"
    )
    assert page(f"{undrawn}.length") == 0
    assert page.said == []


ASSETS = Path(report.__file__ or "").parent / "assets"


TICKS = [
    ("ticks(false, 0, 10, 5)", ["0", "2", "4", "6", "8", "10"]),
    ("ticks(false, -0.00003, 0.00004, 4)", ["−2e−5", "0", "2e−5", "4e−5"]),
    ("ticks(false, 0, 30000, 3)", ["0", "10,000", "20,000", "30,000"]),
    ("ticks(true, -1, 2, 5)", ["0.1", "1", "10", "100"]),
    ("ticks(true, -8, 1, 4)", ["10⁻⁶", "10⁻³", "1"]),
    ("ticks(true, 0, 3.3, 3)", ["1", "10", "100", "1000"]),
    ("ticks(true, 0.5, 5.5, 3)", ["10²", "10⁴"]),
    ("ticks(true, 0.1, 0.9, 5)", ["2", "4", "6"]),
    ("ticks(true, 0, 0, 5)", []),
]


def test_ticks(browser: Browser, path: Path) -> None:
    page = browser.open(path)
    source = (ASSETS / "scale.js").read_text("utf-8")
    for call, labels in TICKS:
        actual = page(f"(() => {{ {source} return {call}.map(t => t.label); }})()")
        assert actual == labels, call


def test_numbers_of_cells(browser: Browser, path: Path) -> None:
    page = browser.open(path)
    source = (ASSETS / "tables.js").read_text("utf-8")
    cells = ["1,234", "−2e−3", "+4", ".5", "< 1e-9", "97 %", "3/10", "∞", "-inf", "2 min 05 s"]
    actual = page(f"(() => {{ {source} return {json.dumps(cells)}.map(number).map(String); }})()")
    assert actual == ["1234", "-0.002", "4", "0.5", "1e-9", "97", "3", "Infinity", "-Infinity", "2"]
    words = page(f"(() => {{ {source} return ['never', 'K-FAC', '', '–'].map(number); }})()")
    assert words == [None] * 4  # NaN, as JSON has it
