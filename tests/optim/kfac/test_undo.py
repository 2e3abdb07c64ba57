"""A controlled step that breaks off leaves everything as it was, and derivatives by other ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Adaptive, Exact, Invariant

from ..common import refused
from .common import DOUBLE, batch

OPTIONS: dict[str, dict[str, Any]] = {
    "tikhonov": {"damping": Adaptive(0.1), "weight_decay": 0.1},
    "exact": {"damping": Adaptive(Exact(0.1))},
    "invariant": {"damping": Adaptive(Invariant(0.1))},
    "ekfac": {"damping": Adaptive(0.1), "ekfac": True},
    "rule": {"damping": Adaptive(0.1), "step": pb.steps.QuadraticModel()},
    "drawn": {"damping": Adaptive(0.1), "fisher": "mc", "statistics_every": 2},
}


def normalized() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Tanh(), nn.Linear(6, 4)
    ).to(DOUBLE)


def kfac(model: Any, **options: Any) -> pb.KFAC:
    chosen = {"lr": 0.1, "fisher": "exact", "statistics_every": 1, "invert_every": 1, **options}
    return pb.KFAC(model, likelihood=pb.likelihoods.Categorical(), **chosen)


class Closure:
    """A loss whose n-th evaluation ends in another way."""

    def __init__(
        self, model: Any, opt: pb.KFAC, end: Callable[[], Any], at: int, *data: Tensor
    ) -> None:
        self._model, self._opt, self._end, self._at, self.calls = model, opt, end, at, 0
        self._data = data or batch()

    def __call__(self) -> Any:
        self.calls += 1
        x, y = self._data
        self._opt.zero_grad()
        loss = F.cross_entropy(self._model(x), y)
        loss.backward()
        return self._end() if self.calls == self._at else loss


def everything(model: Any, opt: pb.KFAC) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": opt.state_dict(),
            "random": torch.get_rng_state(),
        }
    )


def same(one: Any, two: Any) -> bool:
    """To the same bits."""
    if isinstance(one, Tensor):
        return isinstance(two, Tensor) and one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(v, two[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def interrupted() -> Any:
    raise KeyboardInterrupt


def failed() -> Any:
    raise LookupError("the data is gone")


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_interrupt_in_the_second_evaluation_changes_nothing(name: str, steps: int) -> None:
    model = normalized()
    opt = kfac(model, **OPTIONS[name])
    closure = Closure(model, opt, interrupted, 2 * steps + 2)
    for _ in range(steps):
        opt.step(closure)
    before, info = everything(model, opt), opt.info
    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert closure.calls == 2 * steps + 2
    assert same(everything(model, opt), before)
    assert opt.info is info
    # and the next one is that of a twin which was never interrupted
    twin, two = copy.deepcopy((model, opt))
    random = torch.get_rng_state()
    opt.step(closure)
    torch.set_rng_state(random)
    two.step(Closure(twin, two, failed, 0))
    assert same(everything(model, opt)["model"], everything(twin, two)["model"])


def test_the_users_exception_is_passed_on() -> None:
    model = normalized()
    opt = kfac(model, damping=Adaptive(0.1))
    before = everything(model, opt)
    with pytest.raises(LookupError, match="the data is gone"):
        opt.step(Closure(model, opt, failed, 2))
    assert same(everything(model, opt), before)


RETURNED: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "did not return the loss"),
    "text": (lambda: "low", "did not return the loss"),
    "pair": (lambda: (torch.zeros(()), 0), "did not return the loss"),
    "vector": (lambda: torch.zeros(3), "is not one number"),
    "complex": (lambda: torch.zeros((), dtype=torch.complex128), "is not one number"),
}


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", RETURNED)
def test_closures_that_do_not_return_the_loss(name: str, at: int) -> None:
    model = normalized()
    opt = kfac(model, damping=Adaptive(0.1))
    before, (end, what) = everything(model, opt), RETURNED[name]
    with refused(what, "", "eturn"):
        opt.step(Closure(model, opt, end, at))
    assert same(everything(model, opt), before)


# --- models without forward-mode derivatives ------------------------------------------------------


class Square(torch.autograd.Function):
    """In the old style, which torch.func does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * ctx.saved_tensors[0] * g


class Opaque(Square):
    """Its cotangent leaves the graph on the way."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * ctx.saved_tensors[0] * g.detach()


class Once(Square):
    """Not differentiable twice, and it says so."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * ctx.saved_tensors[0] * g


class Squared(nn.Module):
    def __init__(self, square: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 5).to(DOUBLE), nn.Linear(5, 4).to(DOUBLE)
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.square(self.one(x)))


CONTROLLED = [{"damping": Adaptive(0.1)}, {"step": pb.steps.QuadraticModel(), "weight_decay": 0.1}]


@pytest.mark.parametrize("options", CONTROLLED)
def test_custom_functions_go_by_two_reverse_passes(options: dict[str, Any]) -> None:
    infos, values = [], []
    for square in (torch.square, Square.apply):
        model = Squared(square)
        opt = kfac(model, **options)
        closure = Closure(model, opt, failed, 0)
        for _ in range(3):
            opt.step(closure)
        infos.append([opt.info.ratio or 0.0, opt.info.step_size or 0.0, opt.info.momentum or 0.0])
        values.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert infos[0] == pytest.approx(infos[1], rel=1e-9)
    torch.testing.assert_close(values[1], values[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [Opaque, Once])
@pytest.mark.parametrize("options", CONTROLLED)
def test_functions_without_any_second_derivative(kind: Any, options: dict[str, Any]) -> None:
    model = Squared(kind.apply)
    opt = kfac(model, **options)
    before = everything(model, opt)
    with refused("needs directional derivatives", "neither a forward-mode", "Leave out Adaptive"):
        opt.step(Closure(model, opt, failed, 0))
    assert same(everything(model, opt), before)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.stack([x, -x, x * x], 1))[0].mean(1))


@pytest.mark.parametrize("options", CONTROLLED)
def test_fused_recurrent_kernels_are_left_aside(options: dict[str, Any]) -> None:
    """In single precision a CPU has kernels for them with one reverse pass and no more."""
    infos, (x, y) = [], batch()
    for dtype in (torch.float32, DOUBLE):
        model = Recurrent().to(dtype)
        opt = kfac(model, **options)
        opt.step(Closure(model, opt, failed, 0, x.to(dtype), y))
        infos.append([opt.info.ratio or 0.0, opt.info.step_size or 0.0])
    assert infos[0] == pytest.approx(infos[1], rel=2e-3)
