"""Many small networks of one kind, trained side by side on subsets of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap


@dataclass(frozen=True)
class Schedule:
    """Momentum SGD, or Adam, whose rate falls along half a cosine.

    Attributes:
        epochs: passes over a subset.
        batch: samples of a step.
        rate, momentum, decay: of SGD; the decay is that of the weights.
        is_adaptive: whether directions are divided by the root of their second moments, as Adam's.
    """

    epochs: int = 20
    batch: int = 64
    rate: float = 0.05
    momentum: float = 0.9
    decay: float = 1e-3
    is_adaptive: bool = False

    def rate_at(self, share: float) -> float:
        """Return the learning rate after this share of the steps."""
        return self.rate * 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * share))))


def draw_subsets(samples: int, count: int, seed: int, share: float = 0.5) -> Tensor:
    """Return `count` random subsets, (count, samples·share) sorted indices."""
    generator = torch.Generator().manual_seed(seed)
    size = int(samples * share)
    rows = [torch.randperm(samples, generator=generator)[:size].sort().values for _ in range(count)]
    return torch.stack(rows)


@dataclass
class TrainedNetworks:
    """Networks side by side: parameters (M, *shape) by name."""

    template: nn.Module
    parameters: dict[str, Tensor]

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of all networks on the same inputs, (M, N, classes)."""

        def one(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(self.template, parameters, (x,))

        with torch.no_grad():
            return vmap(one)(self.parameters)

    def network(self, number: int) -> nn.Module:
        """Return one of the networks as a module."""
        state = {name: tensor[number] for name, tensor in self.parameters.items()}
        self.template.load_state_dict(state)
        return self.template


class StackedOptimizer:
    """SGD with momentum, or Adam, for networks side by side."""

    #: the weight of the past in Adam's second moments, and what is added to their root
    second_weight = 0.99
    least_root = 1e-8

    def __init__(self, parameters: dict[str, Tensor], schedule: Schedule) -> None:
        self._parameters = parameters
        self._schedule = schedule
        self._first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def step(self, gradients: dict[str, Tensor], rate: float, count: int) -> None:
        """Move the parameters; `count` is the number of this step, from 1."""
        for name, p in self._parameters.items():
            gradient = gradients[name].add(p, alpha=self._schedule.decay)
            first = self._first[name]
            if not self._schedule.is_adaptive:
                first.mul_(self._schedule.momentum).add_(gradient)
                p.sub_(first, alpha=rate)
                continue
            second = self._second[name]
            first.lerp_(gradient, 1 - self._schedule.momentum)
            second.lerp_(gradient.square(), 1 - self.second_weight)
            root = (second / (1 - self.second_weight**count)).sqrt_().add_(self.least_root)
            p.addcdiv_(first, root, value=-rate / (1 - self._schedule.momentum**count))


def train_networks(
    make: Callable[[], nn.Module],
    x: Tensor,
    y: Tensor,
    subsets: Tensor,
    seeds: Sequence[int],
    schedule: Schedule,
    measure: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> TrainedNetworks:
    """Return one network per row of `subsets`, trained on those samples alone.

    The seed of a network decides its initial weights and the order of its samples. `measure` is the
    loss of a batch.
    """
    networks = []
    for seed in seeds:
        torch.manual_seed(seed)
        networks.append(make().to(x.device))
    parameters, _ = stack_module_state(networks)
    parameters = {name: p.detach() for name, p in parameters.items()}
    optimizer = StackedOptimizer(parameters, schedule)
    template = networks[0]

    def loss(values: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return measure(functional_call(template, values, (inputs,)), targets)

    gradients = vmap(grad(loss))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    size = subsets.shape[1]
    steps_per_epoch = size // schedule.batch
    total = steps_per_epoch * schedule.epochs
    step = 0
    for _ in range(schedule.epochs):
        orders = torch.stack([torch.randperm(size, generator=g) for g in generators])
        shuffled = subsets.gather(1, orders)
        for start in range(0, steps_per_epoch * schedule.batch, schedule.batch):
            chosen = shuffled[:, start : start + schedule.batch].to(x.device)
            slopes = gradients(parameters, x[chosen], y[chosen])
            rate = schedule.rate_at(step / total)
            step += 1
            optimizer.step(slopes, rate, step)
    return TrainedNetworks(template, parameters)
