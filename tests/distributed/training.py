"""Models and loops that run in one process on the joined batch, or in several on parts of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from pullback.optim.kfac import KFACLoadPlanner
from tests.kfac_options import kfac_of

from .world import GROUPS, place

#: with statistics in five of them, and inversions in the first three and the last
STEPS = 10
#: with statistics and inversions in three of them
FEW = 5
IGNORED = -100


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 20)
        self.two = nn.Linear(20, 17)
        self.last = nn.Linear(17, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.two(torch.tanh(self.one(x[:, 0])))))


def make_large_head() -> nn.Module:
    model = Dense()
    nn.init.normal_(model.last.weight)
    return model


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 4, 3)
        self.two = nn.Conv2d(4, 6, 3, groups=2, bias=False)
        self.norm = nn.GroupNorm(2, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(torch.tanh(self.one(x[:, None])))
        return self.last(torch.tanh(self.norm(h)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed((3 * x[..., 0]).abs().long() % 7))
        return self.last(h + self.mix(h, h, h, need_weights=False)[0])


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(6, 5, batch_first=True)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(x)[0][:, -1])


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(6, 5, 3, padding=1)
        self.cell = nn.GRU(5, 4, batch_first=True)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(torch.tanh(self.filter(x)).mT)[0][:, -1])


class Experts(nn.Module):
    """Samples whose first entry is positive go to one layer, the others to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.high = nn.Linear(5, 5)
        self.low = nn.Linear(5, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        up = x[:, 0] > 0
        h = torch.tanh(self.first(x))
        out = torch.zeros_like(h)
        for rows, layer in ((up, self.high), (~up, self.low)):
            if bool(rows.any()):
                out = out.index_put((rows,), layer(h[rows]))
        return self.last(torch.tanh(out) + h)


class Tied(nn.Module):
    """A weight in two roles, whose factors are merged."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 6)
        self.mix = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)
        self.last.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((3 * x[..., 0]).abs().long() % 4).mean(1)
        return self.last(torch.tanh(self.mix(h + x[:, 1])))


#: those with well-conditioned factors are named small
MODELS: dict[str, Any] = {
    "dense": Dense,
    "small": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Tanh(), nn.Linear(3, 4)),
    "large head": make_large_head,
    "convolutions": Convolutions,
    "attention": Attention,
    "recurrence": Recurrence,
    "waves": Waves,
    "experts": Experts,
    "tied": Tied,
}


def model_of(model_name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[model_name]().double().to(place())


def batch(step: int, samples: int, model_name: str) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 6, 6, generator=random, dtype=torch.float64)
    if model_name == "attention":
        shape = (samples, 6)
    else:
        shape = (samples,)
    y = torch.randint(0, 4, shape, generator=random)
    if model_name == "attention":  # padding
        y[torch.rand(shape, generator=random) < 0.2] = IGNORED
    return x.to(place()), y.to(place())


def share(counts: tuple[int, ...], rank: int) -> slice:
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


@dataclass(frozen=True)
class How:
    """What a loop does beside its steps."""

    plain: bool = False  #: the model is not wrapped; the optimizer gets the group
    micro: int = 1  #: passes per step
    clip: float | None = None  #: the largest norm of the gradient
    start: int = 0  #: the first step's number
    load: str | None = None
    save: str | None = None


@dataclass(frozen=True)
class Loop:
    """A model, the module that the loop calls, its optimizer, and how many processes there are."""

    model: nn.Module
    net: Any
    opt: Any
    size: int
    how: How

    def backward(self, x: Tensor, y: Tensor, total: Tensor) -> Tensor:
        """Return the loss of this process's samples, weighted such that its mean is the joint one.

        All but the last of several passes send nothing.
        """
        self.opt.zero_grad()
        out = torch.zeros((), dtype=torch.float64, device=place())
        pieces = list(zip(x.chunk(self.how.micro), y.chunk(self.how.micro), strict=True))
        for i, (inputs, target) in enumerate(pieces):
            is_last = i == len(pieces) - 1
            with self.net.no_sync() if self.is_wrapped and not is_last else nullcontext():
                z = self.net(inputs).flatten(0, -2)
                summed = F.cross_entropy(z, target.flatten(), reduction="sum")
                loss = summed / total * self.size
                loss.backward()
            out = out + loss.detach()
        if self.how.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.how.clip)
        return out

    @property
    def is_wrapped(self) -> bool:
        return self.net is not self.model

    def step(self, x: Tensor, y: Tensor, total: Tensor) -> None:
        """Take a step, with a closure where the optimizer tries several."""
        if self.opt.is_controlled:
            self.opt.step(lambda: self.backward(x, y, total))
            return
        self.backward(x, y, total)
        self.opt.step()


def make_loop(size: int, model_name: str, options: dict[str, Any], how: How) -> Loop:
    """Build a model and its optimizer, on one process or several."""
    model = model_of(model_name)
    net: Any = model
    group = None
    if size > 1 and how.plain:
        group = GROUPS[size]
    elif size > 1:
        net = DistributedDataParallel(
            model, process_group=GROUPS[size], find_unused_parameters=model_name == "experts"
        )
    options = {"lr": 0.05, "statistics_every": 2, "invert_every": 4, **options}
    return Loop(model, net, kfac_of(net, group=group, **options), size, how)


def train(
    rank: int,
    size: int,
    model_name: str,
    counts: tuple[int, ...],
    options: dict[str, Any],
    steps: int = STEPS,
    **how: Any,
) -> dict[str, Tensor]:
    """Train on this process's samples, and return the parameters."""
    loop = make_loop(size, model_name, options, How(**how))
    if loop.how.load is not None:
        load(loop.net, loop.opt, loop.how.load, size)
    rows = share(counts, rank) if size > 1 else slice(None)
    for step in range(loop.how.start, steps):
        x, y = batch(step, sum(counts), model_name)
        loop.step(x[rows], y[rows], (y != IGNORED).sum())
    if loop.how.save is not None:
        save(loop.net, loop.opt, loop.how.save, size)
    return {n: p.detach().cpu().clone() for n, p in loop.model.named_parameters()}


def save(net: nn.Module, opt: Any, path: str, size: int) -> None:
    """Write a checkpoint."""
    state = {"model": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}
    dcp.save(state, checkpoint_id=path, process_group=GROUPS.get(size), no_dist=size == 1)


def load(net: nn.Module, opt: Any, path: str, size: int) -> None:
    """Take up a checkpoint that any number of processes has written."""
    state = {"model": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}
    dcp.load(
        state,
        checkpoint_id=path,
        planner=KFACLoadPlanner(),
        process_group=GROUPS.get(size),
        no_dist=size == 1,
    )
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, opt, state["opt"])
