"""The exact natural gradient at sizes where the Jacobian cannot be stored.

    pullback bench scale [--device cuda] [--only NAME] [--profile]

Time and memory of one exact damped step in sample space beside one SGD step of the same model and
batch, in float32, and the step's relative error against the same step in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from ..framework.benchmark import Record, make_parser
from ..framework.timing import compare, describe_machine, peak_bytes
from .models import CIFAR_MLP, WIDE_MLP, mlp, resnet18

PROBLEMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cifar-mlp": (lambda: mlp(CIFAR_MLP), (256, 3072)),
    "wide-mlp": (lambda: mlp(WIDE_MLP), (512, 3072)),
    "wide-mlp-tanh": (lambda: mlp(WIDE_MLP, nn.Tanh), (512, 3072)),
    "resnet18": (resnet18, (128, 3, 32, 32)),
}


def closure_of(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return closure


def optimizer(model: nn.Module, lr: float = 0.0) -> pb.NaturalGradient:
    metric = pb.metrics.Fisher(pb.likelihoods.Categorical())
    return pb.NaturalGradient(model, metric, pb.solvers.Cholesky(1e-3), pb.steps.Constant(lr))


def natural(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], pb.StepInfo]:
    opt = optimizer(model)
    closure = closure_of(model, x, y)
    return lambda: opt.step(closure)


def sgd(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Any]:
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    closure = closure_of(model, x, y)
    return lambda: opt.step(closure)


def relative_error(model: nn.Module, x: Tensor, y: Tensor, *, same_pattern: bool) -> float:
    """‖x32 − x64‖/‖x64‖ of the natural gradient at the same parameters.

    With ReLU the two precisions are not the same function: units that lie within round-off of zero
    switch (`count_switched_units` counts them). `same_pattern` gives the float64 network the units
    that are on in float32, and so isolates the arithmetic.
    """
    short = optimizer(model).direction(closure_of(model, x, y)).x
    exact = copy.deepcopy(model).double()
    if same_pattern:
        fix_pattern(exact, model, x)
    reference = optimizer(exact).direction(closure_of(exact, x.double(), y)).x
    return float((short.double() - reference).norm() / reference.norm())


class Mask(nn.Module):
    """A ReLU whose units are switched on beforehand."""

    def __init__(self, on: Tensor) -> None:
        super().__init__()
        self.register_buffer("on", on)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.on


@torch.no_grad()
def count_switched_units(model: nn.Sequential, x: Tensor) -> int:
    """How many units are on in one precision and off in the other."""
    count = 0
    exact = copy.deepcopy(model).double()
    y = x.double()
    for layer, twin in zip(model, exact, strict=True):
        if isinstance(layer, nn.ReLU):
            count += int(((x > 0) != (y > 0)).sum())
        x = layer(x)
        y = twin(y)
    return count


@torch.no_grad()
def fix_pattern(target: nn.Module, source: nn.Module, x: Tensor) -> None:
    """Replace the ReLUs of the Sequential `target` by the pattern of `source` at x."""
    assert isinstance(target, nn.Sequential)
    assert isinstance(source, nn.Sequential)
    for i, layer in enumerate(source):
        if isinstance(layer, nn.ReLU):
            target[i] = Mask(x > 0)
        x = layer(x)


def build(name: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
    make, shape = PROBLEMS[name]
    with torch.device(device):
        return make(), torch.randn(shape), torch.randint(0, 10, (shape[0],))


def measure(name: str, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x, y = build(name, device)
    routes = {"SGD": sgd(model, x, y), "natural gradient": natural(model, x, y)}
    info = natural(model, x, y)()
    times = compare(routes, device, repeats=10, warmup=3)
    memory = {route: peak_bytes(run, device) for route, run in routes.items()}
    error = relative_error(model, x, y, same_pattern=False)
    rectified = isinstance(model, nn.Sequential) and isinstance(model[1], nn.ReLU)
    if rectified:
        fixed = relative_error(model, x, y, same_pattern=True)
    else:
        fixed = error
    ratio = times["natural gradient"] / times["SGD"]
    jacobian = info.rows * info.parameters * 4
    print(
        f"\n{name}: {info.parameters:,} parameters, {info.rows:,} rows, form {info.gram!r}, "
        f"J would take {jacobian / 2**30:.0f} GiB"
    )
    for route in routes:
        print(f"  {route:17} {1e3 * times[route]:8.2f} ms   {memory[route] / 2**30:6.2f} GiB peak")
    print(f"  ratio {ratio:.1f}×, step error against float64 {error:.1e}", end="")
    if rectified and isinstance(model, nn.Sequential):
        print(
            f", with the same units on {fixed:.1e}; {count_switched_units(model, x)} units switch",
            end="",
        )
    print()
    return {
        "parameters": info.parameters,
        "rows": info.rows,
        "milliseconds": {r: 1e3 * t for r, t in times.items()},
        "peak_bytes": memory,
        "ratio": ratio,
        "error": error,
        "error_same_pattern": fixed,
    }


def profile(name: str, device: torch.device) -> None:
    model, x, y = build(name, device)
    run = natural(model, x, y)
    for _ in range(3):
        run()
    with torch.profiler.profile() as trace:
        run()
    order = f"self_{device.type}_time_total"
    print(trace.key_averages().table(sort_by=order, row_limit=18, max_name_column_width=60))


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=None, choices=sorted(PROBLEMS))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    names = options.only or list(PROBLEMS)
    if device.type == "cpu" and not options.only:
        names = ["cifar-mlp"]
    print(describe_machine(device))
    record = Record.on_device(options.out, device, resume=False)
    for name in names:
        record.put(name, measure(name, device))
        if options.profile:
            profile(name, device)
