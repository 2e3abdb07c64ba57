"""Where the repository lies, and the folder of its records."""

from __future__ import annotations

from pathlib import Path

#: the folder that holds `experiments/`, where this package runs from a checkout
REPOSITORY = Path(__file__).resolve().parents[4]


def find_results_folder() -> Path:
    """Return the checkout's folder of records; `results` here where the package is installed."""
    if (REPOSITORY / "experiments" / "pyproject.toml").exists():
        return REPOSITORY / "experiments" / "results"
    return Path("results")


RESULTS = find_results_folder()
