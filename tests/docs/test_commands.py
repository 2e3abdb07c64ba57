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


COMMANDS = sorted({(page, *words) for page, words in commands()})


def check_pullback(name: str, *words: str) -> None:
    """The command has the options, and knows the experiment or problem."""
    options = {word for word in words if word.startswith("--")}
    assert options <= list_options(name, words)
    if name == "run" and words[0] != "NAME":
        assert registry.find(words[0]).anywhere or "--device" not in words
    if name == "solve" and words not in ((), ("NAME",)):
        assert words[0] in SETUPS


def list_options(name: str, words: tuple[str, ...]) -> set[str]:
    """Return the options of a command; those of a benchmark are in its module's text."""
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    options = set().union(*(param.opts for param in command.params))
    if name != "bench" or not words or words[0].startswith("-"):
        return options
    text = (BENCHMARKS / f"{words[0].replace('-', '_')}.py").read_text("utf-8")
    return options | {word for word in words if word.startswith("--") and word in text}


def check_script(*words: str) -> None:
    assert all((ROOT / word).exists() for word in words if word.endswith(".py"))


def check_module(flag: str, module: str, *arguments: str) -> None:
    """The module exists, and its text has the options."""
    assert flag == "-m"
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    if spec.submodule_search_locations is None:
        text = Path(spec.origin).read_text("utf-8")
        assert all(word in text for word in arguments if word.startswith("--"))


def check_target(name: str, *words: str) -> None:
    assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def check_installation(command: str, *words: str) -> None:
    assert command == "install"


CHECKS = {
    "pullback": check_pullback,
    "torchrun": check_script,
    "python": check_module,
    "make": check_target,
    "pip": check_installation,
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command_exists(command: tuple[str, ...]) -> None:
    _, program, *words = command
    if words[0].endswith(".py"):
        check_script(*words)
    else:
        CHECKS[program](*words)
