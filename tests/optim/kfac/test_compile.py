"""Compiled models: statistics see all layers, and the other steps run the compiled code."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from ..common import assert_close
from .common import DOUBLE, batch, kfac, train, vector

WAYS = ["module", "wrapper", "in place", "in place, earlier"]


class Counting:
    """A backend that counts what was compiled and what ran."""

    def __init__(self) -> None:
        self.compiled = 0
        self.ran = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Sequential):
    """Layers in a module with a `forward` of its own.

    Before torch 2.13 that of `nn.Sequential` is not compiled where a hook breaks the graph.
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def network() -> Any:
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 4)]
    return Network(*layers).to(DOUBLE)


def pair(compiled_by: str, backend: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The optimizer, what the loop calls, and the module."""
    model = network()
    if compiled_by == "wrapper":
        call = torch.compile(model, backend=backend)
        return kfac(call, **options), call, model
    if compiled_by == "in place, earlier":
        model.compile(backend=backend)
    opt = kfac(model, **options)
    if compiled_by == "in place":
        model.compile(backend=backend)
    return opt, torch.compile(model, backend=backend) if compiled_by == "module" else model, model


@pytest.mark.parametrize(
    "compiled_by", [*WAYS[:2], *(pytest.param(w, marks=pytest.mark.slow) for w in WAYS[2:])]
)
def test_steps_are_those_of_the_plain_model_and_run_compiled_code(compiled_by: str) -> None:
    backend = Counting()
    opt, call, model = pair(compiled_by, backend, statistics_every=3, invert_every=6)
    twin = network()
    twin.load_state_dict(model.state_dict())
    other = kfac(twin, statistics_every=3, invert_every=6)
    compiled = []
    for i in range(7):
        ran = backend.ran
        before = backend.compiled
        torch.manual_seed(i)
        (has_statistics,) = train(opt, call, start=i)
        assert has_statistics == (i % 3 == 0)
        assert has_statistics or backend.ran > ran
        compiled.append(backend.compiled - before)
        torch.manual_seed(i)
        train(other, twin, start=i)
    assert sum(compiled[2:]) == 0  # nothing is compiled again
    assert_close(vector(model), vector(twin), 1e-12)
    assert_close(opt.gram().dense(), other.gram().dense(), 1e-12)
    assert [r.block for r in opt.coverage()] == [r.block for r in other.coverage()]
    assert int(model[2].num_batches_tracked) == 7  # statistics leave the running averages alone


@pytest.mark.parametrize(
    ("compiled_by", "backend"),
    [
        pytest.param("module", "aot_eager", marks=pytest.mark.slow),
        ("wrapper", "eager"),
        pytest.param("in place", "eager", marks=pytest.mark.slow),
        pytest.param(WAYS[3], "aot_eager", marks=pytest.mark.slow),
    ],
)
def test_evaluation_in_between_and_layers_that_are_unfrozen(compiled_by: str, backend: str) -> None:
    """In compiled code a layer's statistics come one step late at most."""
    opt, call, model = pair(compiled_by, backend, statistics_every=100)
    model[0].requires_grad_(False)
    with torch.no_grad():
        call(batch()[0])
    for module in (model, call):
        module.eval()
    call(batch()[0])
    for module in (model, call):
        module.train()
    assert train(opt, call, 2) == [True, False]
    model[0].requires_grad_(True)
    assert any(train(opt, call, 2, start=2))
    assert train(opt, call, 2, start=4) == [False, False]
    assert all("kronecker" in row.block or "units" in row.block for row in opt.coverage())


def test_a_compiled_part_and_a_compiled_loss() -> None:
    backend = Counting()
    plain = network()
    body: Any = torch.compile(network(), backend=backend)
    model = nn.Sequential(body, nn.Linear(4, 4, dtype=DOUBLE))
    loss = torch.compile(lambda x, y: F.cross_entropy(plain(x), y), backend="eager")
    first = kfac(model)
    second = kfac(plain)
    for i in range(3):
        second.zero_grad()
        loss(*batch(seed=i)).backward()
        second.step()
        assert train(first, model, start=i) == [second.info.took_statistics] == [i % 2 == 0]
    assert backend.ran == 1
    for opt in (first, second):
        assert all(row.block != "gradient" for row in opt.coverage())


def test_an_input_that_was_overwritten_before_the_pass_is_repeated() -> None:
    opt, call, _ = pair("module", "eager")
    x, y = batch()
    loss = F.cross_entropy(call(x), y)
    x.zero_()
    with pytest.raises(pb.PullbackError, match="An input changed after the forward pass"):
        loss.backward()
    opt.close()
