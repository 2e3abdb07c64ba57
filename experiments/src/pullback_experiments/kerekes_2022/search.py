"""Section 4's search: is there a setting of NGD that completes a matrix?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pullback import PullbackError
from pullback.linear import DeepMatrix

from ..framework.experiment import Context
from ..framework.plain import Record
from .common import generator, normal
from .factorization import Observed, descend, product

SIZE, RANK, COUNT, STEPS = 16, 2, 130, 80

#: Fisher matrices: of all entries, as in the paper, and of the observed ones
FISHERS = ("all entries", "observed entries")


def search(trials: int, steps: int, context: Context) -> Record:
    """Random depth 2–3, learning rate, size of the start, damping; and EGD with L = 2, 3 beside."""
    source, here = generator(20_000 + context.seed), torch.device("cpu")  # tiny decompositions
    truth = normal((SIZE, RANK), source, here) @ normal((RANK, SIZE), source, here)
    data = Observed.of(truth * (SIZE / truth.norm()), [COUNT], source)
    out = []
    for i in range(trials):
        out.append(_trial(i, data, source))
        context.watch(i / trials, "trials")
    return {
        "trials": out,
        "euclidean": [_euclidean(d, data, context.seed, min(steps, 4000)) for d in (2, 3)],
    }


def _euclidean(depth: int, data: Observed, seed: int, steps: int) -> float:
    source = generator(30_000 + seed)
    factors = [
        1e-3 ** (1 / depth) * normal((SIZE, SIZE), source, data.truth.device) / SIZE**0.5
        for _ in range(depth)
    ]
    done = descend([w[None] for w in factors], data, steps=steps)
    return float(data.error(product(done))[0])


def _trial(number: int, data: Observed, source: torch.Generator) -> Record:
    """One setting; half of the trials without damping, and half of either with either Fisher."""
    draw = torch.rand(4, generator=source, dtype=torch.float64).tolist()
    setting: dict[str, Any] = {
        "depth": 2 + round(draw[0]),
        "lr": 10 ** (-2 + 2 * draw[1]),
        "start": 10 ** (-3 + 3 * draw[2]),
        "damping": 0.0 if number % 2 else 10 ** (-6 + 8 * draw[3]),
        "fisher": FISHERS[(number // 2) % 2],
    }
    if setting["damping"] > 1:  # far damping shortens steps in proportion
        setting["lr"] *= setting["damping"]
    gain, depth = setting["start"] ** (1 / setting["depth"]), setting["depth"]
    factors = [
        gain * normal((SIZE, SIZE), source, data.truth.device) / SIZE**0.5 for _ in range(depth)
    ]
    try:
        beta = _natural(factors, data, setting)
        error, training = float(data.error(beta[None])[0]), float(data.training(beta[None])[0])
    except (PullbackError, RuntimeError):  # lost: factors that are no longer numbers
        error = training = math.inf
    fine = math.isfinite(error) and math.isfinite(training)
    ends = {"error": error, "training": training} if fine else {"error": None, "training": None}
    return setting | ends


def _natural(factors: list[Tensor], data: Observed, setting: dict[str, Any]) -> Tensor:
    model = DeepMatrix.of(factors)
    truth, mask = data.truth[0], data.mask[0]
    rows, columns = mask.nonzero().T
    entries = (rows, columns) if setting["fisher"] == FISHERS[1] else None
    for _ in range(STEPS):
        gap = (model.beta.detach() - truth).masked_fill(~mask, 0.0)
        if not bool(torch.isfinite(gap).all()) or float(gap.abs().max()) > 1e6:
            return torch.full_like(truth, math.nan)
        if float(gap.norm()) < 1e-5 * float(truth.norm()):
            break
        pull = gap if entries is None else gap[rows, columns]
        moves = model.natural_gradient(pull, entries=entries, damping=setting["damping"])
        with torch.no_grad():
            for w, move in zip(model.factors, moves, strict=True):
                w -= setting["lr"] * move
    return model.beta.detach()
