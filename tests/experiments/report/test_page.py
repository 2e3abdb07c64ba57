"""The page: everything is on it, nothing in it is markup of others, and it needs no network."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pullback import PullbackError
from pullback.cli.app import app
from pullback_experiments.commands import report
from pullback_experiments.framework import executor

from ..small import Small, slow

VOID = {"meta", "link", "img", "br", "input"}


class Tags(HTMLParser):
    """The tags of a page; closing ones must match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.start_tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.start_tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parse(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    return tags


def test_the_page_has_everything_and_escapes_it(tmp_path: Path) -> None:
    executor.run(Small(drawn=True), out=tmp_path)
    path, left_out = report.write(tmp_path)
    assert not left_out
    text = path.read_text("utf-8")
    tags = parse(text)
    assert "Nobody (2000), On &lt;b&gt;decay&lt;/b&gt;" in text
    assert "a higher rate is faster &amp; better" in text
    assert "faster &lt;i&gt;indeed&lt;/i&gt;" in text
    assert "&lt;method&gt;" in text
    assert "reproduced" in text
    assert f"pullback run small --out {tmp_path}" in text
    images = [a["src"] or "" for tag, a in tags.start_tags if tag == "img"]
    assert len(images) == 2
    assert all(s.startswith("data:image/svg+xml;base64,") for s in images)
    assert all(a.get("alt") for tag, a in tags.start_tags if tag == "img")
    for _, attributes in tags.start_tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), "needs the network"
    assert not re.search(r"<(b|i)>", text)
    assert "light-dark(" in text
    assert 'name="viewport"' in text


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    file = tmp_path / "small.json"
    state = json.loads(file.read_text())
    evil = "</script><script>alert(1)</script>\"'"
    state["about"] |= {"name": evil, "claim": evil, "figure": evil, "about": evil, "paper": evil}
    state["summary"]["verdict"] = {"outcome": evil, "why": evil}
    state["summary"]["device"] = evil
    state["summary"]["tables"][0] |= {"title": evil, "columns": [evil, evil]}
    state["environments"][0][evil] = evil
    state["config"][evil] = evil
    (tmp_path / 'a"b<c>.json').write_text(json.dumps(state))
    text = report.write(tmp_path)[0].read_text("utf-8")
    parse(text)
    assert "<script>alert" not in text
    assert text.count("<script>") == 1


def test_figures_are_never_taken_from_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "results"
    executor.run(Small(drawn=True), out=out)
    (tmp_path / "secret.svg").write_text("<svg>secret</svg>")
    file = out / "small.json"
    state = json.loads(file.read_text())
    state["summary"]["figures"] = ["../secret.svg", str(tmp_path / "secret.svg"), "missing.svg"]
    file.write_text(json.dumps(state))
    assert "<img" not in report.write(out)[0].read_text("utf-8")


def test_partial_and_interrupted_runs_are_called_so(tmp_path: Path) -> None:
    executor.run(Small(), seeds=[0, 2], out=tmp_path)
    text = report.write(tmp_path)[0].read_text("utf-8")
    assert "Seeds: 0,2; partial, 1 of 3 are missing (1)" in text
    assert "--seeds 0,2" in text
    assert "<td>0,2, partial</td>" in text
    executor.run(Small(before=slow), out=tmp_path / "b", seconds=0.01)
    text = report.write(tmp_path / "b")[0].read_text("utf-8")
    assert "unfinished, 1 of 6 items" in text
    assert "not judged" in text

    def interrupt(key: str, context: object) -> None:
        if key == "lr 0.5":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(Small(before=interrupt), out=tmp_path / "c")
    text = report.write(tmp_path / "c")[0].read_text("utf-8")
    assert "interrupted before anything was judged" in text


def test_what_cannot_be_read_is_named_and_left_out(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    whole = (tmp_path / "small.json").read_text()
    state = json.loads(whole)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "cut.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "later.json").write_text(json.dumps({**state, "format": "pullback results 2"}))
    changed = {**state, "summary": {**state["summary"], "checks": 3}}
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    (tmp_path / "solved.json").write_text('{"format": "pullback solution 1", "config": {}}')
    outcome = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    text = (tmp_path / "report.html").read_text("utf-8")
    parse(text)
    assert text.count("<article") == 1
    for name in (
        "broken", "cut", "foreign", "list", "bytes", "empty", "deep", "folder", "later", "changed",
        "solved",
    ):  # fmt: skip
        assert f"Left out: {name}.json" in outcome.stdout
        assert f"<li>{name}.json: " in text
    assert "&#x27;pullback results 2&#x27;, of another version" in text


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_results_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(PullbackError, match=r"no results under.*pullback run"):
        report.write(tmp_path)
    text = (tmp_path / "report.html").read_text("utf-8")  # and the page says so
    parse(text)
    assert "There are no results under this folder" in text
    assert ("x.json" in text) == (content is not None)
    outcome = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "Traceback" not in outcome.output


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PullbackError, match="no such folder"):
        report.write(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(PullbackError, match="it is no folder"):
        report.write(tmp_path / "file")


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    (tmp_path / "report.html").mkdir()
    outcome = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert outcome.exit_code == 1
    assert "report.html could not be written" in outcome.output.replace("\n", " ")


def test_text_that_is_no_text_is_written(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    file = tmp_path / "small.json"
    state = json.loads(file.read_text())
    state["about"]["claim"] = "half \ud800 a pair"
    file.write_text(json.dumps(state))
    assert "half ? a pair" in report.write(tmp_path)[0].read_text("utf-8")


def test_the_same_name_in_two_folders_has_two_addresses(tmp_path: Path) -> None:
    for folder in ("a", "b", "b/c"):
        executor.run(Small(), out=tmp_path / folder)
    ids = re.findall(r'<article id="([^"]+)"', report.write(tmp_path)[0].read_text("utf-8"))
    assert ids == ["small", "b-c-small", "b-small"] or len(set(ids)) == 3


def test_a_page_allows_no_other_script_and_no_request(tmp_path: Path) -> None:
    executor.run(Small(), out=tmp_path)
    text = report.write(tmp_path)[0].read_text("utf-8")
    match = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert match
    policy = match[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_what_solve_leaves_is_on_the_page(tmp_path: Path) -> None:
    command = ["solve", "poisson2d", "--steps", "2", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, command).exit_code == 0
    path, left_out = report.write(tmp_path)
    assert not left_out
    text = path.read_text("utf-8")
    parse(text)
    assert "Solved equations" in text
    assert "relative L² error" in text
    assert text.count("data-chart hidden") == 2
    assert f"pullback solve poisson2d --seed 0 --steps 2 --out {tmp_path}" in text
    assert "data:image/png" in text


def test_the_command_that_repeats_a_solve_has_all_of_its_options(tmp_path: Path) -> None:
    command = ["solve", "poisson2d", "--steps", "1", "--seconds", "9.5", "--seed", "3"]
    assert CliRunner().invoke(app, [*command, "--out", str(tmp_path)]).exit_code == 0
    record = tmp_path / "poisson2d-seed3.json"
    content = json.loads(record.read_text())
    assert content["config"]["device"] == "cpu"
    content["config"]["device"] = "cuda:1"
    record.write_text(json.dumps(content))
    text = report.write(tmp_path)[0].read_text("utf-8")
    expected = "pullback solve poisson2d --seed 3 --steps 1 --seconds 9.5 --device cuda:1 --out"
    assert f"{expected} {tmp_path}" in text


def test_committed_results_make_a_page(tmp_path: Path, records: Path) -> None:
    for file in [*records.glob("yin-2024-*.json"), records / "luk-grosse-2018.json"]:
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path, left_out = report.write(tmp_path)
    assert not left_out
    text = path.read_text("utf-8")
    parse(text)
    assert text.count("<article") == 4
    assert text.count("data-chart hidden") > 20
    assert "No curves" not in text
    assert len(text) < 2_000_000
