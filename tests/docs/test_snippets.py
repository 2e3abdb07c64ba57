"""Every snippet of the README and the docs runs, and prints what the page says it prints."""

from pathlib import Path

import pytest

from tests.docs.snippets import FIGURES, ROOT, difference, run, snippets

FILES = [p for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if p.exists()]
#: every entry of docs/errata.md with a check, too long for the page
FILES.append(ROOT / "tests/docs/errata.md")


#: notebooks that train or solve for seconds
SLOW = {
    ROOT / f"docs/notebooks/{name}.md"
    for name in (
        "fit-a-curve",
        "how-sure",
        "kfac-in-your-loop",
        "natural-gradient-in-pictures",
        "quantum-spin-chain",
        "which-samples",
        "your-own-pde",
    )
}
#: pages whose programs are those of tests/geometry, integrations, laws, pde and vmc
SLOW |= {
    ROOT / f"docs/{name}.md"
    for name in ("audit", "flatness", "geometry", "loops", "natural-gradient", "pdes", "vmc")
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=pytest.mark.slow if p in SLOW else ()) for p in FILES],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text(encoding="utf-8")
    if not any(snippets(text)):
        pytest.skip("no python fences")
    monkeypatch.chdir(tmp_path)
    for snippet, printed in run(path):
        if snippet.output is not None:
            wrong = difference(snippet.output, printed, snippet.rtol)
            assert wrong is None, f"{path.name}, line {snippet.line}: {wrong}"


def test_every_figure_is_on_a_page() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FILES)
    unused = [p.name for p in FIGURES.rglob("*.*") if p.suffix != ".py" and p.name not in text]
    assert not unused


def test_fences() -> None:
    text = (
        "{0}\na = 1\n```\n\n<!-- no-run -->\n{0}\nboom\n```\n\n"
        "{0}\nb = a\n```\n\n<!-- rtol 0.5 -->\n```text\nb 1\n```\n"
    )
    first, second = snippets(text.format("```python"))
    assert (first.line, first.code, first.output) == (2, "a = 1\n", None)
    assert (second.line, second.code, second.output) == (11, "b = a\n", "b 1\n")
    assert second.rtol == 0.5


def test_fences_that_need_a_package() -> None:
    text = "<!-- needs {} -->\n```python\na = 1\n```\n"
    assert [s.code for s in snippets(text.format("torch numpy"))] == ["a = 1\n"]
    assert not [*snippets(text.format("torch no_such_package"))]


@pytest.mark.parametrize(
    ("shown", "printed", "is_equal"),
    [
        ("loss 0.50\n", "loss 0.51", True),
        ("loss 0.50", "loss 0.60", False),
        ("loss 0.50", "Loss 0.50", False),
        ("1e-3, 1,000", "1.02e-3, 1,001", True),
        ("rank 3", "rank 3 4", False),
        ("−1", "1", False),
        ("(3, 4) conv2", "(3, 4) conv3", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(
    shown: str, printed: str, is_equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.docs.snippets.COMPARED", True)
    assert (difference(shown, printed, 0.05) is None) == is_equal
