"""One run of one method on one problem: the curve, thinned."""

from __future__ import annotations

import math
from typing import Any

from pullback import pde

from ..framework.experiment import Context, Paused
from ..framework.plain import Record

_ENTRIES = 60  # of a curve


def solved(found: pde.Setup, options: dict[str, Any], seconds: float, context: Context) -> Record:
    """So many seconds of steps, unless the run ends before; it goes on from its checkpoint."""

    def watch(run: pde.Run, info: Any) -> bool:
        context.watch(min(run.history.spent / seconds, 1.0), f"error {run.error:.1e}")
        return context.due or run.history.spent >= seconds or not math.isfinite(info.loss)

    network = found.network(context.seed)
    solution = pde.solve(
        found.problem, network, **{**options, "seed": context.seed}, callbacks=[watch],
        checkpoint=context.folder() / "run.pt", device=context.device, progress=False,
    )  # fmt: skip
    history = solution.history
    unfinished = history.spent < seconds and math.isfinite(history.loss[-1])
    if unfinished and "callback" in solution.stopped:
        raise Paused
    count = len(history.error)
    places = sorted({*range(0, count, max(1, count // _ENTRIES)), count - 1})
    return {
        "parameters": sum(p.numel() for p in network.parameters()),
        "step": [history.measured[i] for i in places],
        "seconds": [history.clock[i] for i in places],
        "error": [history.error[i] for i in places],
        "loss": solution.loss,
        "stopped": solution.stopped,
    }
