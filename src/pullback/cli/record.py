"""The result of a solve: a table for people, a record for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from ..pde import PDESolution, Setup
from ..pde.networks.modules import Slabs
from ..pde.networks.separable import Separable
from . import files
from .environment import describe_environment
from .terminal import make_fact_table

FORMAT = "pullback solution 1"


def summarize(solution: PDESolution) -> Table:
    """Return a table: what was solved, by which network, how long it took, how large errors are."""
    history = solution.history
    network = solution.network
    rows = {
        "problem": solution.problem.name,
        "network": f"{describe_network(network)}, {count_parameters(network):,} parameters",
        "steps": f"{len(history):,}",
        "seconds": f"{history.spent:.1f}",
        "loss": f"{solution.loss:.2e}",
    }
    if history.error:
        rows["error"] = f"{history.error[-1]:.2e} (relative L²)"
        if len(solution.problem.fields) > 1:
            rows["of each field"] = ", ".join(f"{k} {v:.1e}" for k, v in solution.errors.items())
    rows |= {n: f"{v:.8g}" for n, v in solution.unknowns.items()}
    return make_fact_table({**rows, "stopped": solution.stopped})


def make_report(
    setup_name: str, setup: Setup, seed: int, device: str, options: dict[str, Any],
    solution: PDESolution,
) -> dict[str, Any]:  # fmt: skip
    """Return all of a run but its parameters: configuration, result, history, environment.

    `setup_name` is the argument of `pullback solve`: a set-up, or the path of a Python file.
    """
    history = solution.history
    error = history.error[-1] if history.error else None
    return {
        "format": FORMAT,
        "config": {
            "name": Path(setup_name).stem,
            "problem": setup.problem.name,
            "equation": getattr(setup.problem, "equation", ""),
            "conditions": [c.name for c in setup.problem.conditions],
            "network": describe_network(solution.network),
            "parameters": count_parameters(solution.network),
            "dtype": str(next(solution.network.parameters()).dtype),
            "setup": setup_name,
            "seed": seed,
            "device": device,
            "options": {key: _to_json(value) for key, value in options.items()},
        },
        "result": {
            "steps": len(history),
            "seconds": history.spent,
            "loss": solution.loss,
            "error": error,
            "unknowns": solution.unknowns,
            "stopped": solution.stopped,
        },
        "history": history.as_dict(),
        "environment": describe_environment(device),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write content as JSON, in which numbers that are not finite become null."""
    text = json.dumps(_replace_infinite(content), indent=1, ensure_ascii=False)
    files.write_text(path, text + "\n")


def describe_network(network: nn.Module) -> str:
    """Return the widths of the linear layers, after the number of slabs of time.

    >>> from pullback.pde import mlp
    >>> describe_network(mlp(2, 32, 1))
    '2-32-1'
    """
    if isinstance(network, Slabs):
        return f"{len(network.networks)} × {describe_network(network.networks[0])}"
    if any(isinstance(m, Separable) for m in network.modules()):
        return "functions of one coordinate"
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if not layers:
        return type(network).__name__
    widths = [layers[0].in_features] + [layer.out_features for layer in layers]
    return "-".join(map(str, widths))


def count_parameters(network: nn.Module) -> int:
    """Return the number of a network's parameters."""
    return sum(p.numel() for p in network.parameters())


def _to_json(value: Any) -> Any:
    """Return a value of JSON; objects become their text."""
    if isinstance(value, dict):
        return {str(key): _to_json(entry) for key, entry in value.items()}
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    return repr(value)


def _replace_infinite(value: Any) -> Any:
    """Return the value with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _replace_infinite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_replace_infinite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
