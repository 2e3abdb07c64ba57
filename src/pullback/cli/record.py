"""What a solve leaves behind: a table for people, a record for programs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn

from ..pde import PDESolution, Setup
from ..pde.networks.modules import Slabs
from . import files
from .environment import environment
from .terminal import facts

FORMAT = "pullback solution 1"


def summary(solution: PDESolution) -> Table:
    """What was solved, with what, how long it took and how well it went."""
    history = solution.history
    rows = {
        "problem": solution.problem.name,
        "network": f"{described(solution.network)}, {parameters(solution.network):,} parameters",
        "steps": f"{len(history):,}",
        "seconds": f"{history.spent:.1f}",
        "loss": f"{solution.loss:.2e}",
    }
    if history.error:
        rows["error"] = f"{history.error[-1]:.2e} (relative L²)"
        if len(solution.problem.fields) > 1:
            rows["of each field"] = ", ".join(f"{k} {v:.1e}" for k, v in solution.errors.items())
    rows |= {n: f"{v:.8g}" for n, v in solution.unknowns.items()}
    return facts({**rows, "stopped": solution.stopped})


def report(
    name: str, found: Setup, seed: int, device: str, options: dict[str, Any], solution: PDESolution
) -> dict[str, Any]:
    """All of a run but its parameters: configuration, result, history, environment."""
    history = solution.history
    return {
        "format": FORMAT,
        "config": {
            "name": name,
            "problem": found.problem.name,
            "equation": getattr(found.problem, "equation", ""),
            "conditions": [c.name for c in found.problem.conditions],
            "network": described(solution.network),
            "parameters": parameters(solution.network),
            "dtype": str(next(solution.network.parameters()).dtype),
            "seed": seed,
            "options": {k: _plain(v) for k, v in options.items()},
        },
        "result": {
            "steps": len(history),
            "seconds": history.spent,
            "loss": solution.loss,
            "error": history.error[-1] if history.error else None,
            "unknowns": solution.unknowns,
            "stopped": solution.stopped,
        },
        "history": history.as_dict(),
        "environment": environment(device),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """As JSON; numbers that are not finite become null, which JSON can hold."""
    files.write_text(path, json.dumps(_finite(content), indent=1, ensure_ascii=False) + "\n")


def described(network: nn.Module) -> str:
    """The widths of its linear layers, behind the number of slabs of time.

    >>> from pullback.pde import mlp
    >>> described(mlp(2, 32, 1))
    '2-32-1'
    """
    if isinstance(network, Slabs):
        return f"{len(network.networks)} × {described(network.networks[0])}"
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    if not layers:
        return type(network).__name__
    return "-".join(str(n) for n in [layers[0].in_features, *(m.out_features for m in layers)])


def parameters(network: nn.Module) -> int:
    """How many there are."""
    return sum(p.numel() for p in network.parameters())


def _plain(value: Any) -> Any:
    """What JSON can hold; objects by their text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
