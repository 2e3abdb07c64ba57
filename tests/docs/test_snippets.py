"""Every ``python`` fence of the README and the docs runs, in order, one namespace per file.

A fence preceded by ``<!-- no-run -->`` is skipped.
"""

import re
from pathlib import Path

import matplotlib
import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [p for p in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if p.exists()]
FENCE = re.compile(
    r"(?P<skip><!-- no-run -->\s*\n)?"
    r"^(?P<indent>[ \t]*)```python\b[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)


def snippets(text: str) -> list[tuple[int, str]]:
    """(line of the code's first line, code) of each fence to run."""
    found = []
    for match in FENCE.finditer(text):
        if match["skip"] is None:
            code = re.sub(rf"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
            found.append((text.count("\n", 0, match.start("code")) + 1, code))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fences = snippets(path.read_text(encoding="utf-8"))
    if not fences:
        pytest.skip("no python fences")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    namespace: dict[str, object] = {"__name__": "__snippet__"}
    for line, code in fences:
        # Blank lines put the file's own line numbers into a traceback.
        exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)


def test_a_fence_marked_no_run_is_skipped() -> None:
    text = "{0}\na = 1\n```\n\n<!-- no-run -->\n{0}\nboom\n```\n\n{0}\nb = a\n```\n"
    assert snippets(text.format("```python")) == [(2, "a = 1\n"), (11, "b = a\n")]
