"""What K-FAC sends per step, beside the gradients of DistributedDataParallel.

Bytes are counted on paper: the library's own code packs, places and counts; tensors have shapes
alone, and nothing is sent. With `--measure` two processes with gloo train small networks, and the
host's time in collectives is measured.

    pullback bench traffic [--processes 8 64 256 1024]
    pullback bench traffic --measure
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pullback as pb
from pullback._core.processes import Pending, Processes, Traffic
from pullback.grams.kronecker.packed_matrix import launch_sum, map_entries
from pullback.optim.kfac import Natural
from pullback.optim.kfac.replicas import Replicas

from ..framework.benchmark import RESULTS, make_parser, write_results
from .kfac_models import GPT, convnet, resnet50

#: networks, and inputs of a first step
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet-50": (resnet50, lambda: torch.randn(2, 3, 64, 64)),
    "GPT-2": (lambda: GPT(depth=12), lambda: torch.randint(0, 50257, (1, 16))),
}
CATEGORICAL = pb.likelihoods.Categorical()
RULES: dict[str, dict[str, Any]] = {
    "natural": {"rule": Natural(CATEGORICAL, kl_clip=None)},
    "natural, kl_clip": {"likelihood": CATEGORICAL},
    "eigenbasis": {"rule": "eigenbasis"},
    "spectral": {"rule": "spectral"},
}


class Paper(Processes):
    """The first of `size` processes, which counts what it would send."""

    def __init__(self, size: int, traffic: dict[str, Traffic] | None = None) -> None:
        super().__init__(None, traffic)
        self.size = size

    def join_subgroup(self, subgroups: Sequence[Sequence[int]]) -> Paper:
        return Paper(len(subgroups[0]), self._traffic)

    def _all_reduce(self, t: Tensor, operation: str = "SUM", *, is_async: bool = False) -> Any:
        return Pending(lambda: None)

    def _broadcast(self, t: Tensor, rank: int, what: str) -> None:
        self._make_counted_call(what, t.nbytes, lambda: None)

    def _all_gather(self, t: Tensor, what: str) -> Tensor:
        self._make_counted_call(what, (self.size - 1) * t.nbytes, lambda: None)
        return t.new_empty(self.size * t.numel())


def shape_of(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device="meta")


def take_first_step(model: nn.Module, inputs: Tensor, options: dict[str, Any]) -> pb.KFAC:
    """Return the optimizer after one step: its statistics have shown what it keeps and sends."""
    opt = pb.KFAC(model, **options)
    model(inputs).square().mean().backward()
    opt.step()
    opt.close()
    return opt


def count(
    model: nn.Module, opt: pb.KFAC, size: int, workers: int
) -> tuple[dict[str, float], float, dict[str, float]]:
    """Return bytes per step by purpose, calls, and bytes summed in single backward passes.

    Intervals are those of the rule. Passes are those with statistics. The optimizer has taken a
    step; its tensors lose their values.
    """
    state = opt.blocks
    paper = Paper(size)
    replicas = Replicas(paper, workers, is_wrapped=True)
    keys = sorted(state.averages, key=lambda key: key.names)
    sides: list[Any] = []
    for key in keys:
        sides += [map_entries(shape_of, t) for t in state.averages[key].value.values()]
    sums = Paper(size)
    launch_sum(sides, sums).wait()
    sent = sum(traffic.bytes for traffic in sums.traffic().values())
    period = opt.statistics_every
    factors = sent / period
    passes: dict[str, float] = {"statistics": sent, "statistics_every": period}
    calls = sum(traffic.calls for traffic in sums.traffic().values()) / period
    for key in keys:
        state.states.replace_tensors(key, shape_of)
        state.states.blocks[key].is_ready = True
    replicas.assign_owners(state.states, state.averages, {*keys})
    replicas._send(state.states, keys)
    gradients = {n: shape_of(p) for n, p in model.named_parameters()}
    replicas.gather_directions(state.states, gradients, [], gradients)
    steps = {"inverses": opt.invert_every, "directions": 1}
    by_purpose = {what: traffic.bytes / steps[what] for what, traffic in paper.traffic().items()}
    calls += sum(traffic.calls / steps[what] for what, traffic in paper.traffic().items())
    return {"factors": factors, **by_purpose}, calls, passes


# --- measured -------------------------------------------------------------------------------------

#: networks, and batches of one process: inputs, shape of the targets, number of classes
SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], tuple[int, ...], int]] = {
    "convnet": (lambda: convnet(16), lambda: torch.randn(16, 3, 32, 32), (16,), 10),
    "decoder": (
        lambda: GPT(96, 32, width=64, depth=2, heads=4),
        lambda: torch.randint(0, 96, (4, 32)),
        (4, 32),
        96,
    ),
}


def measure(rank: int, size: int, name: str, options: dict[str, Any] | None, steps: int) -> Any:
    """Return seconds per step, and those in collectives by purpose, from step 100 on."""
    build, draw, shape, classes = SMALL[name]
    torch.manual_seed(0)
    net = DistributedDataParallel(build())
    if options is None:
        opt: Any = torch.optim.SGD(net.parameters(), 1e-3)
    else:
        opt = pb.KFAC(net, **options)
    torch.manual_seed(rank)
    before = {}
    start = 0.0
    for step in range(100 + steps):
        if step == 100:  # inversions become rare
            dist.barrier()
            if options is not None:
                before = opt.traffic()
            else:
                before = {}
            start = time.perf_counter()
        x = draw()
        y = torch.randint(0, classes, shape)
        opt.zero_grad()
        F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()
        opt.step()
    dist.barrier()
    whole = time.perf_counter() - start
    sent = {}
    assert options is None or opt.info.accepted
    if options is not None:
        for what, traffic in opt.traffic().items():
            sent[what] = (traffic.seconds - before.get(what, Traffic()).seconds) / steps
    return whole / steps, sent


def _measure_all(rank: int, size: int, out: str, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    results = []
    rules = {"SGD": None, **{rule: o for rule, o in RULES.items() if rule != "natural"}}
    for name in SMALL:
        for rule, options in rules.items():
            seconds, sent = measure(rank, size, name, options, steps)
            spent = sum(sent.values())
            row = {"model": name, "rule": rule, "processes": size, "seconds": seconds}
            results.append({**row, "collectives": spent, "share": spent / seconds, **sent})
            if rank == 0:
                print(
                    f"{name:9} {rule:17} {1e3 * seconds:7.1f} ms per step, "
                    f"{1e3 * spent:6.2f} ms in collectives: {spent / seconds:.1%}",
                    flush=True,
                )
    if rank == 0:
        write_results(Path(out), torch.device("cpu"), results)
    dist.destroy_process_group()


def main(arguments: Sequence[str] = ()) -> list[dict[str, Any]]:
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--measure", action="store_true", help="time on two processes instead")
    parser.add_argument("--steps", type=int, default=100, help="that are measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    out = options.out or RESULTS / "traffic.json"
    if options.measure:
        out = options.out or RESULTS / "traffic-time.json"
        mp.spawn(_measure_all, (2, str(out), options.steps), nprocs=2)
        return []
    results = []
    for (name, (build, draw)), rule in itertools.product(MODELS.items(), RULES):
        model = build()
        opt = take_first_step(model, draw(), RULES[rule])
        weights = sum(p.nbytes for p in model.parameters())
        for size in options.processes:
            gradients = 2 * (size - 1) / size * weights
            for workers in (size, 1):
                sent, calls, passes = count(model, opt, size, workers)
                total = sum(sent.values())
                row = {"model": name, "rule": rule, "processes": size, "workers": workers}
                more = {"gradients": gradients, **sent, "total": total, "calls": calls, **passes}
                results.append({**row, **more})
                print(
                    f"{name:9} {size:4} processes, {workers:4} workers, {rule:17}"
                    f"{total / 1e6:7.2f} MB and {calls:.2f} calls per step, "
                    f"{total / gradients:6.1%} of the gradients",
                    flush=True,
                )
    write_results(out, torch.device("cpu"), results)
    return results
