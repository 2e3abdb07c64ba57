"""A curvature that several processes fit together is that of one process."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pullback as pb
from pullback import PullbackError

from .checks import Checks, only, same_everywhere
from .world import World, place

CHECKS = Checks(__name__)


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Conv2d(1, 3, 3), nn.Tanh(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 3)
    return nn.Sequential(*layers).to(place())


def data(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 1, 4, 4, generator=generator)
    y = torch.randint(0, 3, (count,), generator=generator)
    return x.to(place()), y.to(place())


def compare(rank: int, size: int, structure: str) -> None:
    net = model()
    x, y = data(17)
    options = {"likelihood": pb.likelihoods.Categorical(), "structure": structure}
    want = pb.curvature.fit(net, (x, y), group=only(rank), **options)
    share = (x[rank::size], y[rank::size])
    fitted = pb.curvature.fit(net, share, group=dist.group.WORLD, **options)
    assert fitted.samples == want.samples == 17
    v = torch.randn(want.space.size, generator=torch.Generator().manual_seed(0)).to(place())
    assert (fitted.matvec(v) - want.matvec(v)).norm() <= 1e-12 * want.matvec(v).norm()
    scores = pb.curvature.influence(fitted, data(4), (x, y), damping=0.1)
    single = pb.curvature.influence(want, data(4), (x, y), damping=0.1)
    assert (scores - single).norm() <= 1e-10 * single.norm()
    same_everywhere(fitted.eigenvalues())


@CHECKS.add
def ekfac(rank: int, size: int) -> None:
    compare(rank, size, "ekfac")


@CHECKS.add
def kfac(rank: int, size: int) -> None:
    compare(rank, size, "kfac")


@CHECKS.add
def exact(rank: int, size: int) -> None:
    compare(rank, size, "exact")


@CHECKS.add
def diagonal(rank: int, size: int) -> None:
    compare(rank, size, "diagonal")


@CHECKS.add
def a_checkpoint_that_one_process_lost(rank: int, size: int) -> None:
    """The sums of a complete pass are those of all: without one of them the pass starts again."""
    net = model()
    x, y = data(17)
    share = (x[rank::size], y[rank::size])
    options = {"likelihood": pb.likelihoods.Categorical(), "group": dist.group.WORLD}
    want = pb.curvature.fit(net, share, **options)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        with mock.patch("pullback.curvature.fitter.Checkpoint.remove"):
            pb.curvature.fit(net, share, checkpoint=path, **options)
        if rank == 1:
            (Path(folder) / "state.1.factors").unlink()
        fitted = pb.curvature.fit(net, share, checkpoint=path, **options)
        assert fitted.totals == want.totals
        assert torch.allclose(fitted.eigenvalues(), want.eigenvalues(), rtol=1e-12)
        assert not list(Path(folder).iterdir())


@CHECKS.add
def an_error_on_one_process_is_raised_on_all(rank: int, size: int) -> None:
    x, y = data(9)
    if rank == 1:
        x[0] = torch.nan
    with pytest.raises(PullbackError, match="not finite"):
        pb.curvature.fit(
            model(), (x, y), likelihood=pb.likelihoods.Categorical(), group=dist.group.WORLD
        )


@CHECKS.add
def processes_that_were_not_told_of_each_other(rank: int, size: int) -> None:
    with pytest.raises(PullbackError, match="was not told"):
        pb.curvature.fit(model(), data(4), likelihood=pb.likelihoods.Categorical())


@pytest.mark.parametrize("name", CHECKS.functions)
def test_processes(world: World, name: str) -> None:
    CHECKS.run(world, name)
