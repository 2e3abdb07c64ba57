"""The equalities of the other files on a GPU: three processes with gloo share it.

NCCL wants a GPU for each process: a group of one shows that it takes what is sent.

    pytest -m cuda tests/distributed/test_cuda.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pullback as pb
from pullback._core.flags import checksum
from pullback._core.processes import Processes
from tests.kfac_options import kfac_of

from . import test_exact, test_kfac, test_ntk, test_pde, test_sharded, test_slices
from .test_kfac import CATEGORICAL, NATURAL, OPTIONS
from .training import MODELS, batch, model_of
from .world import World, place, settle

DEVICE = "cuda"
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    settle(DEVICE)  # of the single process that the others are compared with
    yield
    settle("cpu")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    processes = World(3, device=DEVICE)
    yield processes
    processes.close()


# --- K-FAC ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_options(world: World, name: str) -> None:
    test_kfac.test_options(world, name)


@pytest.mark.parametrize("model_name", [kind for kind in MODELS if kind != "small"])
def test_layers(world: World, model_name: str) -> None:
    test_kfac.check_processes(world, model_name, NATURAL)


@pytest.mark.parametrize("name", ["clip", "eigenbasis", "spectral"])
def test_workers(world: World, name: str) -> None:
    test_kfac.test_workers(world, name)


def test_two_processes(world: World) -> None:
    test_kfac.check_processes(world, "convolutions", OPTIONS["clip"], (20, 16))


def test_a_plain_module_and_an_empty_batch(world: World) -> None:
    test_kfac.check_processes(world, "dense", OPTIONS["clip"], (20, 0, 16), plain=True)


@pytest.mark.parametrize("name", ["no clip", "eigenbasis", "spectral"])
def test_checkpoints(world: World, tmp_path: Path, name: str) -> None:
    test_kfac.test_checkpoints(world, tmp_path, name)


@pytest.mark.parametrize("model_name", ["plain", "eigenbasis", "scaler"])
def test_replicas_are_equal_to_the_bit(world: World, model_name: str) -> None:
    test_kfac.test_replicas_are_equal_to_the_bit(world, model_name)


def _wide(rank: int, size: int, options: dict[str, Any]) -> Tensor:
    """Sides of a size that a GPU holds in float16, where its products may be TF32's."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    try:
        layers = nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 700), nn.ReLU(), nn.Linear(700, 10)
        net = DistributedDataParallel(nn.Sequential(*layers).to(place()))
        opt = kfac_of(net, statistics_every=2, invert_every=4, **options)
        for step in range(6):
            random = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(64, 300, generator=random).to(place())
            y = torch.randint(0, 10, (64,), generator=random).to(place())
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            opt.step()
        assert opt.info.accepted
        return nn.utils.parameters_to_vector(net.parameters()).detach().cpu()
    finally:
        torch.set_float32_matmul_precision("highest")


WIDE: dict[str, dict[str, Any]] = {
    "natural": {"likelihood": CATEGORICAL},
    "one worker": {"likelihood": CATEGORICAL, "workers": 1},
    "no clip": {"likelihood": CATEGORICAL, "kl_clip": None, "lr": 1e-3, "damping": 0.1},
    "eigenbasis": {"rule": "eigenbasis"},
    "spectral": {"rule": "spectral"},
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_replicas_in_single_precision(world: World, name: str) -> None:
    first, *others = world.run(_wide, WIDE[name])
    assert bool(torch.isfinite(first).all())
    assert all(torch.equal(first, other) for other in others)


# --- exact methods, kernels, PDEs and slices ------------------------------------------------------


@pytest.mark.parametrize("name", test_exact.CHECKS.functions)
def test_exact_methods(world: World, name: str) -> None:
    test_exact.CHECKS.run(world, name)


@pytest.mark.parametrize("name", test_ntk.CHECKS.functions)
def test_kernels(world: World, name: str) -> None:
    test_ntk.CHECKS.run(world, name)


PDES = [
    "more_rows_than_parameters", "more_parameters_than_rows", "fewer_points_than_processes",
    "energies", "other_optimizers", "checkpoints", "what_is_not_finite_is_named_everywhere",
]  # fmt: skip


@pytest.mark.parametrize("name", PDES)
def test_pdes(world: World, name: str) -> None:
    test_pde.CHECKS.run(world, name)


@pytest.mark.parametrize("name", test_slices.CHECKS.functions)
def test_steps_in_the_quotient(world: World, name: str) -> None:
    test_slices.CHECKS.run(world, name)


# --- pieces ---------------------------------------------------------------------------------------


def _without_us(rank: int, size: int) -> None:
    """Training in pieces by torch alone."""
    net = test_sharded.shard_model("dense", size)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    x, y = batch(rank, 8, "dense")
    for _ in range(2):
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()
    test_sharded.whole(net)


@pytest.fixture(scope="module")
def pieces() -> Iterator[World]:
    """A world of its own, since torch may not be able to do that with gloo and a GPU."""
    processes = World(4, device=DEVICE)
    for size in (2, 3, 4):
        errors = processes.errors(_without_us, size=size)
        if any(error is not None for error in errors):
            processes.close()
            pytest.skip(f"torch {torch.__version__} cannot fully_shard with gloo here: {errors}")
    yield processes
    processes.close()


@pytest.mark.parametrize("name", ["clip", "no clip", "ekfac", "eigenbasis", "spectral"])
def test_pieces(pieces: World, name: str) -> None:
    test_sharded.check_processes(pieces, "dense", OPTIONS[name])


@pytest.mark.parametrize("model_name", ["convolutions", "attention"])
def test_layers_in_pieces(pieces: World, model_name: str) -> None:
    test_sharded.check_processes(pieces, model_name, OPTIONS["clip"])


def test_replicas_of_pieces(pieces: World) -> None:
    test_sharded.check_processes(pieces, "dense", OPTIONS["clip"], (10, 8, 11, 7))


def test_checkpoints_in_pieces(pieces: World, tmp_path: Path) -> None:
    test_sharded.test_checkpoints(pieces, tmp_path, "clip", (20, 16))


# --- NCCL -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def single() -> Iterator[World]:
    if DEVICE == "cuda" and not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    processes = World(1, device=DEVICE, backend="nccl" if DEVICE == "cuda" else "gloo")
    yield processes
    processes.close()


def _pretend_to_send(rank: int, size: int) -> None:
    """Let a single process send what several would."""
    Processes.is_single = property(lambda self: False)  # pyright: ignore[reportAttributeAccessIssue]


def _buffers(rank: int, size: int) -> None:
    processes = Processes(dist.group.WORLD)
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8]
    tensors = [
        torch.arange(n + 3, dtype=model_name, device=place()) for n, model_name in enumerate(types)
    ]
    for exchanged in (
        processes.sum(tensors),
        processes.sum_to(tensors, [0] * len(tensors)),
        processes.gather(tensors),
        [gathered[0] for gathered in processes.gather_parts(tensors)],
    ):
        assert all(torch.equal(a, b) for a, b in zip(exchanged, tensors, strict=True))
    before = [t.clone() for t in tensors]
    processes.exchange(tensors, [0] * len(tensors))
    processes.broadcast_first(tensors)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    assert processes.compare(["a"], [True], [checksum(tensors)]) == ([True, True], [True])
    assert processes.all_agree(True) is True
    assert not bool(processes.all_agree(torch.tensor(False, device=place())))
    assert processes.broadcast_object({"a": 1}) == {"a": 1}
    assert processes.gather_objects("b") == ["b"]


def test_buffers_that_nccl_takes(single: World) -> None:
    single.run(_pretend_to_send)
    single.run(_buffers)


def _in_a_group_of_one(rank: int, size: int, name: str) -> tuple[Tensor, Any]:
    model = model_of("convolutions")
    net = DistributedDataParallel(model)
    opt = kfac_of(net, **{"lr": 0.05, "statistics_every": 2, "invert_every": 4, **OPTIONS[name]})
    for step in range(10):
        x, y = batch(step, 36, "convolutions")
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    opt.state_dict()
    sent = {what: traffic.calls for what, traffic in opt.traffic().items()}
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu(), sent


@pytest.mark.parametrize("name", ["clip", "no clip", "eigenbasis", "spectral"])
def test_kfac_with_nccl(single: World, name: str) -> None:
    single.run(_pretend_to_send)
    weights, sent = single.run(_in_a_group_of_one, name)[0]
    want = test_kfac.train(0, 1, "convolutions", (36,), OPTIONS[name])
    assert {"factors", "counts", "decisions"} <= sent.keys()
    whole = torch.cat([p.flatten() for p in want.values()])
    torch.testing.assert_close(weights, whole, rtol=1e-10, atol=1e-10)


def _exact_in_a_group_of_one(rank: int, size: int) -> None:
    """Both spaces, a tangent kernel and a PDE, through the same calls."""
    torch.set_default_dtype(torch.float64)
    try:
        for solver, count in ((pb.solvers.Cholesky(1e-2), 12), (pb.solvers.PseudoInverse(), 60)):
            model = test_exact.mlp()
            opt = test_exact.natural(solver)(DistributedDataParallel(model))
            x, y = test_exact.batch(count=count)
            infos = test_exact.steps(opt, opt.model, x, y, 1 / count, 3)
            assert all(info.accepted for info in infos)
            assert opt.traffic()
        x = test_ntk.inputs(8)
        kernel = pb.kernels.ntk(test_ntk.model(), x, group=dist.group.WORLD)
        assert bool(torch.isfinite(kernel).all())
        poisson = pb.pde.Poisson(dim=2)
        network = test_pde.network()
        options: Any = {"points": 40, "steps": 5, "progress": False}
        solution = pb.pde.solve(poisson, network, group=dist.group.WORLD, **options)
        assert solution.history.loss[-1] < solution.history.loss[0]
    finally:
        torch.set_default_dtype(torch.float32)


def test_exact_methods_with_nccl(single: World) -> None:
    single.run(_pretend_to_send)
    single.run(_exact_in_a_group_of_one)
