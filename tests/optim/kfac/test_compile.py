"""Compiled models: statistics see all layers, and the other steps run the compiled code."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..common import assert_close
from .common import DOUBLE, batch, kfac, train, vector

WAYS = ["module", "wrapper", "in place", "in place, earlier"]


class Counting:
    """A backend that counts what was compiled and what ran."""

    def __init__(self) -> None:
        self.compiled, self.ran = 0, 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def network() -> Any:
    parts = [nn.Linear(3, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4)]
    return nn.Sequential(*parts).to(DOUBLE)


def pair(way: str, backend: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The optimizer, what the loop calls, and the module."""
    model = network()
    if way == "wrapper":
        call = torch.compile(model, backend=backend)
        return kfac(call, **options), call, model
    if way == "in place, earlier":
        model.compile(backend=backend)
    opt = kfac(model, **options)
    if way == "in place":
        model.compile(backend=backend)
    return opt, torch.compile(model, backend=backend) if way == "module" else model, model


@pytest.mark.parametrize("way", WAYS)
def test_compiled_models(way: str) -> None:
    backend = Counting()
    opt, call, model = pair(way, backend, statistics_every=3, invert_every=6)
    taken, ran, compiled = [], [], []
    for i in range(9):
        before = backend.ran, backend.compiled
        taken += train(opt, call, start=i)
        ran.append(backend.ran - before[0])
        compiled.append(backend.compiled - before[1])
    assert taken == 3 * [True, False, False]
    assert all(n for n, t in zip(ran, taken, strict=True) if not t)  # they do run compiled code
    assert sum(compiled[2:]) == 0  # and nothing is compiled again
    assert {k.names for k in opt.curvature.averages} == {
        ("0.weight", "0.bias"),
        ("2.weight", "2.bias"),
        ("4.weight", "4.bias"),
    }
    assert int(model[2].num_batches_tracked) == 9  # statistics leave the running averages alone


@pytest.mark.parametrize("way", WAYS)
def test_the_steps_are_those_of_the_plain_model(way: str) -> None:
    options: dict[str, Any] = {"statistics_every": 2, "invert_every": 4}
    opt, call, model = pair(way, "eager", **options)
    twin = network()
    twin.load_state_dict(model.state_dict())
    other = kfac(twin, **options)
    torch.manual_seed(1)
    train(opt, call, 5)
    torch.manual_seed(1)
    train(other, twin, 5)
    assert_close(vector(model), vector(twin), 1e-12)
    assert_close(opt.gram().dense(), other.gram().dense(), 1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_aot(way: str) -> None:
    opt, call, _ = pair(way, "aot_eager")
    assert train(opt, call, 4) == [True, False, True, False]
    assert all(row.block != "gradient" for row in opt.coverage())


@pytest.mark.parametrize("way", WAYS)
def test_evaluation_and_validation_in_between(way: str) -> None:
    opt, call, model = pair(way, Counting())
    with torch.no_grad():
        call(batch()[0])
    model.eval()
    call(batch()[0])
    model.train()
    if way == "wrapper":
        call.train()
    assert train(opt, call, 2) == [True, False]
    model.eval()
    with torch.no_grad():
        call(batch()[0])
    model.train()
    assert train(opt, call, 2, start=2) == [True, False]


@pytest.mark.parametrize("way", WAYS)
def test_late_unfrozen_layers(way: str) -> None:
    """In compiled code a layer's statistics come one step late at most."""
    opt, call, model = pair(way, Counting(), statistics_every=100)
    model[0].requires_grad_(False)
    assert train(opt, call, 2) == [True, False]
    model[0].requires_grad_(True)
    assert any(train(opt, call, 2, start=2))
    assert train(opt, call, 2, start=4) == [False, False]
    assert all("kronecker" in row.block or "units" in row.block for row in opt.coverage())


def test_a_compiled_part() -> None:
    backend = Counting()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body: Any = torch.compile(network(), backend=backend)
            self.head = nn.Linear(4, 4, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model = Outer()
    opt = kfac(model)
    assert train(opt, model, 3) == [True, False, True]
    assert backend.ran == 1
    assert len(opt.curvature.averages) == 4


def test_a_compiled_training_step() -> None:
    model = network()
    opt = kfac(model)

    @torch.compile(backend="eager")
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    taken = []
    for i in range(4):
        opt.zero_grad()
        loss(*batch(seed=i)).backward()
        opt.step()
        taken.append(opt.info.taken)
    assert taken == [True, False, True, False]
    assert len(opt.curvature.averages) == 3
