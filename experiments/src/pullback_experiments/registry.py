"""Experiments and benchmarks by name.

A new experiment is a folder with a tuple `EXPERIMENTS`, and a line here. A new benchmark is a
module of `benchmarks/` with a function `main(arguments)`. Only the folder or module that is asked
for is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pullback._core.errors import PullbackError, describe_nearest_names

if TYPE_CHECKING:
    from .framework.experiment import Experiment

#: the names in each folder's `EXPERIMENTS`
FOLDERS: dict[str, tuple[str, ...]] = {
    "kerekes_2022": (
        "kerekes-2022-figure2",
        "kerekes-2022-figure3",
        "kerekes-2022-figure4",
        "kerekes-2022-figure5",
        "kerekes-2022-figure6",
        "kerekes-2022-theorems",
        "kerekes-2022-support",
    ),
    "bai_2024_projection": ("bai-2024-projection",),
    "bai_2024_slices": ("bai-2024-slices-figure2", "bai-2024-slices-rescaled"),
    "bai_2024_sobolev": (
        "bai-2024-sobolev-cifar10",
        "bai-2024-sobolev-cifar100",
        "bai-2024-sobolev-digits",
    ),
    "van_oostrum_2023": ("van-oostrum-2023-examples",),
    "invariance_audit": ("invariance-audit",),
    "kfac_invariance": ("luk-grosse-2018",),
    "showcase": ("demo",),
    "kfac_training": ("kfac-autoencoder", "kfac-convnet", "kfac-vgg", "kfac-shakespeare"),
    "races": (
        "race-text",
        "race-text-large",
        "race-text-largest",
        "race-text-short",
        "race-images",
    ),
    "vision_recipe": ("vision-recipe",),
    "pde_benchmarks": ("pde-benchmarks",),
    "pde_honesty": ("pde-honesty",),
    "pde_quasi_newton": ("pde-quasi-newton",),
    "pde_stuck": ("pde-stuck",),
    "pde_unseen_seeds": ("pde-unseen-seeds",),
    "curvature": (
        "influence-mnist",
        "influence-cifar",
        "influence-text",
        "influence-scale",
        "laplace-uci",
        "laplace-rotation",
    ),
    "quantum_spins": ("vmc-spins",),
    "yin_2024": ("yin-2024-shallow", "yin-2024-deep", "yin-2024-poisson"),
}


def names() -> list[str]:
    """Return all names that can be run."""
    return list(chain.from_iterable(FOLDERS.values()))


def find(name: str) -> Experiment:
    """Return the experiment of this name; a refusal offers the nearest names."""
    for folder, experiment_names in FOLDERS.items():
        if name in experiment_names:
            experiments = import_module(f".{folder}", __package__).EXPERIMENTS
            return next(e for e in experiments if e.name == name)
    from .problems import SETUPS  # slow to import

    if name in SETUPS:
        raise PullbackError(
            f"{name} is no experiment", "it is a set-up", f"Use `pullback solve {name}`"
        )
    raise PullbackError(
        f"There is no experiment {name!r}",
        describe_nearest_names(name, names()),
        "`pullback list` shows all",
    )


def list_benchmarks() -> dict[str, str]:
    """Return the names of all benchmarks with the first lines of their docstrings."""
    summaries: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / "benchmarks").glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in functions and not path.stem.startswith("_"):
            docstring = ast.get_docstring(tree) or ""
            summaries[path.stem.replace("_", "-")] = docstring.partition("\n")[0]
    return summaries


def run_benchmark(name: str, arguments: Sequence[str] = ()) -> None:
    """Run a benchmark with its options, or raise with the nearest names."""
    names = list(list_benchmarks())
    if name not in names:
        raise PullbackError(
            f"There is no benchmark {name!r}",
            describe_nearest_names(name, names),
            "`pullback bench` shows all",
        )
    module = import_module(f".benchmarks.{name.replace('-', '_')}", __package__)
    module.main(arguments)
