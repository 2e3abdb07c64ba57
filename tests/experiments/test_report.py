"""The page: everything is on it, nothing in it is markup of others, and it needs no network."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pullback import PullbackError
from pullback.experiments.cli import app
from pullback.experiments.commands import report

from .small import Small, slow

VOID = {"meta", "link", "img", "br"}


class Tags(HTMLParser):
    """The tags of a page; closing ones must match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    return tags


def test_the_page_has_everything_and_escapes_it(tmp_path: Path) -> None:
    Small(drawn=True).run(out=tmp_path)
    path, left_out = report.write(tmp_path)
    assert not left_out
    text = path.read_text("utf-8")
    tags = parsed(text)
    assert "Nobody (2000), On &lt;b&gt;decay&lt;/b&gt;" in text
    assert "a higher rate is faster &amp; better" in text
    assert "faster &lt;i&gt;indeed&lt;/i&gt;" in text
    assert "&lt;method&gt;" in text
    assert "reproduced" in text
    assert f"pullback run small --out {tmp_path}" in text
    images = [a["src"] or "" for tag, a in tags.seen if tag == "img"]
    assert len(images) == 2
    assert all(s.startswith("data:image/svg+xml;base64,") for s in images)
    assert all(a.get("alt") for tag, a in tags.seen if tag == "img")
    for _, attributes in tags.seen:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), "needs the network"
    assert not re.search(r"<(b|i)>", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    Small().run(out=tmp_path)
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
    parsed(text)
    assert "<script>alert" not in text
    assert text.count("<script>") == 1


def test_figures_are_never_taken_from_elsewhere(tmp_path: Path) -> None:
    out = tmp_path / "results"
    Small(drawn=True).run(out=out)
    (tmp_path / "secret.svg").write_text("<svg>secret</svg>")
    file = out / "small.json"
    state = json.loads(file.read_text())
    state["summary"]["figures"] = ["../secret.svg", str(tmp_path / "secret.svg"), "missing.svg"]
    file.write_text(json.dumps(state))
    assert "<img" not in report.write(out)[0].read_text("utf-8")


def test_partial_and_interrupted_runs_are_called_so(tmp_path: Path) -> None:
    Small().run(seeds=[0, 2], out=tmp_path)
    text = report.write(tmp_path)[0].read_text("utf-8")
    assert "Seeds: 0,2; partial, 1 of 3 are missing (1)" in text
    assert "--seeds 0,2" in text
    Small(before=slow).run(out=tmp_path / "b", seconds=0.01)
    text = report.write(tmp_path / "b")[0].read_text("utf-8")
    assert "unfinished, 1 of 6 items" in text
    assert "not judged" in text

    def interrupted(key: str, context: object) -> None:
        if key == "lr 0.5":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Small(before=interrupted).run(out=tmp_path / "c")
    text = report.write(tmp_path / "c")[0].read_text("utf-8")
    assert "interrupted before anything was judged" in text


def test_what_cannot_be_read_is_named_and_left_out(tmp_path: Path) -> None:
    Small().run(out=tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "foreign.json").write_text('{"a": 1}')
    state = json.loads((tmp_path / "small.json").read_text())
    state["summary"]["checks"] = 3
    (tmp_path / "changed.json").write_text(json.dumps(state))
    done = CliRunner().invoke(app, ["report", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    for name in ("broken.json", "foreign.json", "changed.json"):
        assert f"Left out: {name}" in done.stdout
        assert name in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize("content", [None, "{"])
def test_a_folder_without_results_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(PullbackError, match=r"no results under.*pullback run"):
        report.write(tmp_path)
    with pytest.raises(PullbackError, match="no folder"):
        report.write(tmp_path / "nowhere")


def test_committed_results_make_a_page(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "benchmarks" / "results"
    for file in source.glob("yin-2024-*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "luk-grosse-2018.json").write_bytes((source / "luk-grosse-2018.json").read_bytes())
    path, left_out = report.write(tmp_path)
    assert not left_out
    text = path.read_text("utf-8")
    parsed(text)
    assert text.count("<article") == 4
