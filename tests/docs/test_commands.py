"""The shell commands of the README and the docs name what exists; other tests run them."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from pullback.cli.app import app
from pullback_experiments import registry
from pullback_experiments.problems import SETUPS
from tests.docs.snippets import ROOT

BENCHMARKS = ROOT / "experiments" / "src" / "pullback_experiments" / "benchmarks"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)

SHELL = {"for", "do", "done", "done;", "wait"}


def commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for fence in FENCE.findall(page.read_text("utf-8")):
            for line in fence.splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] not in SHELL:
                    yield page.name, words


FOUND = sorted({(page, *words) for page, words in commands()})


@pytest.mark.parametrize("actual", FOUND, ids=" ".join)
def test_command_exists(actual: tuple[str, ...]) -> None:
    _, program, *others = actual
    if program == "pullback":
        known = typer.main.get_command(app).commands[others[0]]  # type: ignore[attr-defined]
        options = {name for param in known.params for name in param.opts}
        asked = {word for word in others if word.startswith("--")}
        if others[0] == "bench" and len(others) > 1 and not others[1].startswith("-"):
            module = BENCHMARKS / f"{others[1].replace('-', '_')}.py"
            options |= {option for option in asked if option in module.read_text("utf-8")}
        assert asked <= options
        if others[0] == "run" and others[1] != "NAME":
            assert registry.find(others[1]).anywhere or "--device" not in others
        if others[0] == "solve" and others[1:] not in ([], ["NAME"]):
            assert others[1] in SETUPS
    elif program == "torchrun" or others[0].endswith(".py"):
        assert all((ROOT / word).exists() for word in others if word.endswith(".py"))
    elif program == "python":
        flag, module, *arguments = others
        assert flag == "-m"
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        if spec.submodule_search_locations is None:
            text = Path(spec.origin).read_text("utf-8")
            assert all(word in text for word in arguments if word.startswith("--"))
    elif program == "make":
        assert re.search(rf"^{others[0]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    else:
        assert [program, others[0]] == ["pip", "install"]
