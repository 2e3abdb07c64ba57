"""K-FAC on models that others wrote: which blocks it finds, what it costs, and how it trains.

    python -m benchmarks.third_party [--only NAME ...] [--train] [--out FILE]

Models are built from small configurations with random weights. The shares are those of trained
entries by block, after two steps of natural K-FAC. The ratio is the time of ten steps of
`KFAC(model)`, statistics and inverses included, beside ten of AdamW. With --train each model learns
a small task for 30 steps: SGD with momentum, Adam and `KFAC(model)`, three rates each, the same
batches; a score is the mean loss of the last five steps at the best rate.
Needs `pip install pullback[models] diffusers`; a model whose package is not there is left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pullback as pb

from . import third_party_real
from .third_party_models import Model, models
from .timing import environment

RESULTS = Path(__file__).parent / "results"
STEPS, LAST = 30, 5
RATES = {"SGD": (0.01, 0.1, 1.0), "Adam": (1e-3, 3e-3, 1e-2), "KFAC": (1e-3, 3e-3, 1e-2)}


def output_of(case: Model, out: Any) -> Tensor:
    """The tensor that the loss is made of."""
    if isinstance(out, Tensor):
        return out
    if case.output is None:
        return out.logits
    return out[int(case.output)] if case.output.isdigit() else getattr(out, case.output)


def kfac(case: Model, model: nn.Module, lr: float | None = None, **options: Any) -> pb.KFAC:
    """K-FAC with the model's output."""
    own = case.output
    return pb.KFAC(model, lr, output=int(own) if own and own.isdigit() else own, **options)


def train(
    case: Model, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """The losses of an ordinary loop, on the same batches for every optimizer."""
    losses, random = [], torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for _ in range(steps):
        x, y = case.batch(random)
        optimizer.zero_grad()
        loss = case.loss(output_of(case, model(**x)), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def coverage(case: Model) -> dict[str, Any]:
    """The shares of trained entries by block, and the reasons for diagonals."""
    torch.manual_seed(0)
    model = case.make().train()
    likelihood = case.likelihood or pb.likelihoods.Categorical()
    opt = kfac(case, model, 1e-3, likelihood=likelihood, statistics_every=1)
    train(case, model, opt, 2)
    rows = [r for r in opt.coverage() if r.block not in ("none", "gradient")]
    counts = dict.fromkeys(("kronecker", "units", "diagonal"), 0)
    for row in rows:
        counts[row.block.partition(",")[0].partition(" ")[0]] += torch.Size(row.shape).numel()
    total = sum(counts.values())
    reasons = {r.name: r.reason for r in rows if r.block == "diagonal"}
    return {"parameters": total, "shares": {k: n / total for k, n in counts.items()},
            "diagonal": reasons}  # fmt: skip


def cost(case: Model, steps: int = 10) -> float:
    """The time of `KFAC(model)` over that of AdamW, on the processor."""
    torch.manual_seed(0)
    model, took = case.make().train(), []
    for ours in (False, True):
        own = copy.deepcopy(model)
        opt = kfac(case, own) if ours else torch.optim.AdamW(own.parameters())
        train(case, own, opt, 1)
        start = time.process_time()
        train(case, own, opt, steps)
        took.append(time.process_time() - start)
    return took[1] / took[0]


def race(case: Model) -> dict[str, Any]:
    """The scores of three optimizers at each rate."""
    torch.manual_seed(0)
    start, found = case.make().train(), {}
    for name, rates in RATES.items():
        found[name] = {}
        for lr in rates:
            model = copy.deepcopy(start)
            params = [p for p in model.parameters() if p.requires_grad]
            opt: torch.optim.Optimizer
            if name == "SGD":
                opt = torch.optim.SGD(params, lr, momentum=0.9)
            elif name == "Adam":
                opt = torch.optim.Adam(params, lr)
            else:
                opt = kfac(case, model, lr)
            losses = train(case, model, opt, STEPS)[-LAST:]
            score = sum(losses) / LAST
            found[name][str(lr)] = score if math.isfinite(score) else None
    return found


def best(scores: dict[str, float | None]) -> float:
    """The score at the best rate."""
    return min((s for s in scores.values() if s is not None), default=math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=None)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--real", action="store_true", help="three models at their full sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="with --real: tiny sizes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.real:
        device = torch.device(options.device)
        out = options.out or RESULTS / f"third-party-real-{device.type}.json"
        third_party_real.main(device, options.quick, out, options.only)
        return
    options.out = options.out or RESULTS / "third-party.json"
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if options.out.exists():
        found = json.loads(options.out.read_text("utf-8"))["results"]
    for name, case in models().items():
        if options.only and name not in options.only:
            continue
        row = found.setdefault(name, {})
        row |= {**coverage(case), "ratio": cost(case)}
        if options.train:
            row["scores"] = race(case)
        shares = ", ".join(f"{k} {100 * v:.1f} %" for k, v in row["shares"].items())
        scores = {k: f"{best(v):.3f}" for k, v in row.get("scores", {}).items()}
        print(f"{name}: {row['parameters']}, {shares}, {row['ratio']:.1f}x {scores}", flush=True)
        record = {"environment": environment(torch.device("cpu")), "results": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    scores = [{k: best(v) for k, v in r["scores"].items()} for r in found.values() if "scores" in r]
    ahead = [s for s in scores if s["KFAC"] < min(s["SGD"], s["Adam"])]
    print(f"ahead of SGD and Adam: {len(ahead)} of {len(scores)}")


if __name__ == "__main__":
    main()
