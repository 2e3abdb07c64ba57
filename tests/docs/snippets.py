"""The python fences of a Markdown page, run in order in one namespace.

A ``text`` fence right after a python fence shows what that one prints, and is compared with it:
words exactly, numbers to 5 % or 1e-9, or to the part that a comment ``<!-- rtol 0.5 -->`` between
the two allows. (Numbers are those of x86 processors: on others sums are rounded and random numbers
made otherwise, and long runs end elsewhere; there none is compared.) A fence after
``<!-- no-run -->`` is skipped, and one after ``<!-- needs peft -->`` where that is not installed.

    python -m tests.docs.snippets docs/start.md    # writes what is printed into the page, and
                                                   # figures whose names are in docs/figures/ there
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
COMPARED = platform.machine() in ("x86_64", "AMD64")
ROUND_OFF = 1e-9  # numbers that differ by less are the same
FENCE = re.compile(
    r"(?P<skip><!-- no-run -->\s*\n)?(?:<!-- needs (?P<needs>[\w ]+) -->\s*\n)?"
    r"^(?P<indent>[ \t]*)```python\b[^\n]*\n(?P<code>.*?)^(?P=indent)```[ \t]*$"
    r"(?:\n+(?:<!-- rtol (?P<rtol>\S+) -->\n+)?"
    r"(?P=indent)```text\n(?P<output>.*?)^(?P=indent)```)?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?(?!\w)")


@dataclass(frozen=True)
class Snippet:
    """One python fence: its first line in the file, its code, and what it is said to print."""

    line: int
    code: str
    output: str | None
    rtol: float
    span: tuple[int, int]  # of the output in the page's text


def snippets(text: str) -> Iterator[Snippet]:
    """Every fence that is to be run, in order."""
    for match in FENCE.finditer(text):
        needs = (match["needs"] or "").split()
        if match["skip"] is None and all(importlib.util.find_spec(name) for name in needs):
            code, output = (
                None
                if fence is None
                else re.sub(rf"^{match['indent']}", "", fence, flags=re.MULTILINE)
                for fence in (match["code"], match["output"])
            )
            line = text.count("\n", 0, match.start("code")) + 1
            yield Snippet(
                line, code or "", output, float(match["rtol"] or 0.05), match.span("output")
            )


def run(path: Path) -> Iterator[tuple[Snippet, str]]:
    """Run a page in the current folder: each snippet with what it printed."""
    matplotlib.use("Agg")
    namespace: dict[str, object] = {"__name__": "__snippet__"}
    for snippet in snippets(path.read_text(encoding="utf-8")):
        printed = io.StringIO()
        # Empty lines put the file's own line numbers into a traceback.
        text = "\n" * (snippet.line - 1) + snippet.code
        code = compile(text, str(path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        yield snippet, printed.getvalue()


def difference(shown: str, printed: str, rtol: float) -> str | None:
    """What is wrong with the output that a page shows, or None."""
    left = shown.rstrip()
    right = printed.rstrip()
    if NUMBER.sub("#", left) != NUMBER.sub("#", right):
        return f"the page shows\n{left}\nand the snippet prints\n{right}"
    if not COMPARED:
        return None
    for a, b in zip(NUMBER.findall(left), NUMBER.findall(right), strict=True):
        x, y = (float(s.replace(",", "").replace("−", "-")) for s in (a, b))
        if not math.isclose(x, y, rel_tol=0, abs_tol=max(rtol * abs(x), ROUND_OFF)):
            return f"the page shows {a}, the snippet prints {b}, in\n{right}"
    return None


def update(path: Path) -> None:
    """Write what the snippets print into the page, and their figures into docs/figures."""
    path = path.resolve()
    working_directory = Path.cwd()
    text = path.read_text(encoding="utf-8")
    shift = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for snippet, printed in run(path):
                if snippet.output is not None:
                    start, end = (shift + offset for offset in snippet.span)
                    text = text[:start] + printed.rstrip() + "\n" + text[end:]
                    shift += len(printed.rstrip()) + 1 - (end - start)
            for known in FIGURES.rglob("*.*"):
                if (drawn := Path(known.name)).exists() and f"/{known.name})" in text:
                    shutil.copy(drawn, known)
        finally:
            os.chdir(working_directory)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch.set_default_dtype(torch.float32)
        update(Path(name))
