"""Where the operations of the eigenbasis rule go: counted, in multiples of a step of SGD.

    pullback bench eigenbasis-cost [--batch 512] [--widths 784 1000 500 250 30] [--quick]

The network is an autoencoder, widths down and up again. Floating-point operations of products and
solves are counted, not timed, so that the table does not depend on the machine. For a weight O×I
and a batch of N, a step of SGD takes 6·N·O·I operations. The rule rotates a gradient into two bases
and a direction back: 4·O·I·(O + I) in each step, whatever the schedule is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pullback as pb

from ..framework.benchmark import make_parser


@dataclass(frozen=True)
class Cost:
    """Operations of one step: of products and solves, and functions of torch called."""

    flops: float
    calls: int


class CallCounter(TorchDispatchMode):
    """Counts the functions that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def count_solve(matrix_shape: Any, right_shape: Any, *args: Any, **kwargs: Any) -> int:
    """Return the operations of a solve: an LU factorization and two triangular solves."""
    *batch, rows, columns = right_shape
    count = 1
    for size in batch:
        count *= size
    return int(count * (2 / 3 * rows**3 + 2 * rows**2 * columns))


def count_step(step: Callable[[], Any]) -> Cost:
    """Count the operations of one step."""
    solves = {torch.ops.aten._linalg_solve_ex: count_solve}
    calls = CallCounter()
    with FlopCounterMode(display=False, custom_mapping=solves) as flops, calls:
        step()
    return Cost(float(flops.get_total_flops()), calls.calls)


def make_autoencoder(widths: Sequence[int]) -> nn.Sequential:
    """Return a network with these widths, and the same in reverse."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([*widths, *widths[-2::-1]]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
    """Return a training step on one batch."""

    def step() -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), x).backward()
        optimizer.step()

    return step


def count_costs(widths: Sequence[int], batch: int, first_steps: int = 20) -> dict[str, Cost]:
    """Return the costs of a step of SGD, of a plain one of the rule, and of one that refreshes.

    Args:
        first_steps: until all bases are there; a multiple of the rule's schedule, 10/10.
    """
    torch.manual_seed(0)
    x = torch.randn(batch, widths[0])
    baseline = make_autoencoder(widths)
    sgd = make_step(baseline, torch.optim.SGD(baseline.parameters(), lr=1e-3, momentum=0.9), x)
    model = make_autoencoder(widths)
    optimizer = pb.KFAC(model, rule="eigenbasis")
    step = make_step(model, optimizer, x)
    sgd()
    costs = {"SGD": count_step(sgd)}
    for _ in range(first_steps):
        step()
    costs["refresh"] = count_step(step)
    costs["plain"] = count_step(step)
    return costs


def count_rotations(widths: Sequence[int], *, one_sided: bool = False) -> float:
    """Return the operations of Σ 4·O·I·(O + I), or with the basis of the smaller side alone."""
    total = 0.0
    for inputs, outputs in pairwise([*widths, *widths[-2::-1]]):
        sides = inputs + outputs
        if one_sided:
            sides = min(inputs, outputs)
        total += 4.0 * inputs * outputs * sides
    return total


def main(arguments: Sequence[str] = ()) -> None:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--widths", type=int, nargs="+", default=[784, 1000, 500, 250, 30])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args(arguments)
    widths = options.widths
    if options.quick:
        widths = [24, 16, 8]
    costs = count_costs(widths, options.batch)
    unit = costs["SGD"].flops
    interval = pb.optim.kfac.Eigenbasis.defaults.invert_every
    average = costs["plain"].flops + (costs["refresh"].flops - costs["plain"].flops) / interval
    rows = {
        "a step of SGD": (unit, costs["SGD"].calls),
        "a plain step": (costs["plain"].flops, costs["plain"].calls),
        "  of it rotations, 4·O·I·(O + I)": (count_rotations(widths), None),
        "a step with statistics and turned bases": (costs["refresh"].flops, costs["refresh"].calls),
        f"average, every {interval}th refreshes": (average, None),
        "rotations in the smaller basis alone": (count_rotations(widths, one_sided=True), None),
    }
    print(f"widths {widths}, batch {options.batch}")
    print(f"{'':44}{'× SGD':>8}{'calls':>8}")
    for label, (flops, calls) in rows.items():
        shown = "" if calls is None else str(calls)
        print(f"{label:44}{flops / unit:8.2f}{shown:>8}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
