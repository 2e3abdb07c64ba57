"""Controlled steps: adaptive damping, the quadratic model, KL clips, and what is taken back."""

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Adaptive, Damping, Exact, Invariant, update
from pullback.steps import Backtracking, LevenbergMarquardt, QuadraticModel, TrustNorm
from tests.kfac_options import kfac_of

from ..common import expect_unchanged, flat, refused, solve_damped
from ..common import gram as dense
from .common import DOUBLE, batch, net, vector

CONTROLLED: list[dict[str, Any]] = [
    {"damping": Adaptive(0.1)},
    {"step": QuadraticModel(), "weight_decay": 0.1},
]


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


def interrupt() -> Any:
    raise KeyboardInterrupt


class Closure:
    """The closure everybody writes, whose n-th call may end in another way."""

    def __init__(self, opt: pb.KFAC) -> None:
        self.opt = opt
        self.calls = 0
        self.at = 0
        self.end = interrupt

    def __call__(self) -> Any:
        self.calls += 1
        x, y = batch(20)
        self.opt.zero_grad()
        parameter = next(self.opt.model.parameters())
        loss = F.cross_entropy(self.opt.model(x.to(parameter)), y)
        loss.backward()
        if self.calls == self.at:
            return self.end()
        return loss


def made(model: nn.Module, **options: Any) -> tuple[pb.KFAC, Closure]:
    chosen = {"lr": 1.0, "fisher": "exact", "statistics_every": 1, "invert_every": 1, **options}
    opt = kfac_of(model, likelihood=pb.likelihoods.Categorical(), **chosen)
    return opt, Closure(opt)


@pytest.mark.parametrize("controlled", CONTROLLED)
def test_gradients_may_be_zeroed_in_place(controlled: dict[str, Any]) -> None:
    """A trial's gradients never reach those of the step."""
    x, y = batch(20)
    start = net()

    def run(none: bool) -> tuple[list[float], Tensor]:
        opt, _ = made(copy.deepcopy(start), **controlled)

        def closure() -> Tensor:
            opt.zero_grad(set_to_none=none)
            loss = F.cross_entropy(opt.model(x), y)
            loss.backward()
            return loss

        losses = [float(opt.step(closure).detach()) for _ in range(3)]
        return losses, vector(opt.model)

    losses, parameters = run(True)
    other_losses, other_parameters = run(False)
    assert other_losses == pytest.approx(losses, rel=1e-10)
    torch.testing.assert_close(other_parameters, parameters, rtol=1e-10, atol=1e-10)


def fisher(model: nn.Module) -> Tensor:
    """The whole matrix, by its definition."""
    z = model(batch(20)[0])
    p = z.detach().softmax(1)
    metric = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return dense(z, list(model.parameters()), metric / len(z))


def gradient(model: nn.Module) -> Tensor:
    return flat([p.grad for p in model.parameters()])


def normalized_network() -> Any:
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Tanh(), nn.Linear(6, 4)]
    return nn.Sequential(*layers)


def test_the_quadratic_model_finds_the_best_rate_and_momentum() -> None:
    """The move solves the 2×2 system of the direction and the last move."""
    model = net()
    opt, closure = made(model, damping=1e-2, step=QuadraticModel())
    before = vector(model)
    opt.step(closure)
    for _ in range(3):
        last = before - vector(model)
        before = vector(model)
        matrix = fisher(model) + 1e-2 * torch.eye(len(before))
        opt.step(closure)
        alpha = opt.info.step_size
        beta = opt.info.momentum
        assert alpha is not None
        assert beta is not None
        direction = (before - vector(model) - beta * last) / alpha
        span = torch.stack([direction, last])
        best = torch.linalg.solve(span @ matrix @ span.T, span @ gradient(model))
        torch.testing.assert_close(best, torch.tensor([alpha, beta]), rtol=1e-6, atol=0.0)


def test_adaptive_damping_follows_the_ratio() -> None:
    model = net()
    opt, closure = made(model, damping=Adaptive(1.0), momentum=0.0)
    before = vector(model)
    matrix = fisher(model)
    loss = float(opt.step(closure).detach())
    move = before - vector(model)
    predicted = float(gradient(model) @ move - 0.5 * move @ matrix @ move)
    after = float(closure().detach())
    assert opt.info.ratio == pytest.approx((loss - after) / predicted, rel=1e-6)
    assert opt.info.damping == pytest.approx(1 / 1.5)  # the model was good


def test_a_step_that_raises_the_loss_is_taken_back_with_its_momentum() -> None:
    """Also where the model rose too, and the ratio is positive and tells nothing."""
    model = net()
    opt, closure = made(model, lr=0.1, damping=Adaptive(1e-2))
    opt.step(closure)
    before = vector(model)
    dampings = [opt.info.damping]
    for _ in range(3):
        opt.param_groups[0]["lr"] = 1e3
        opt.step(closure)
        assert not opt.info.accepted
        assert "rose" in opt.info.reason
        assert torch.equal(vector(model), before)
        dampings.append(opt.info.damping)
    assert dampings == sorted(set(dampings))
    twin = copy.deepcopy(opt)
    for other, momentum in ((opt, 0.9), (twin, 0.0)):
        other.param_groups[0].update(lr=0.1, momentum=momentum)
        other.step(Closure(other))
        assert other.info.accepted
    assert torch.equal(vector(model), vector(twin.model))


@pytest.mark.parametrize(
    "options",
    [
        {"damping": Adaptive(1.0)},
        {"step": QuadraticModel()},
        {"step": QuadraticModel(), "damping": Adaptive(1.0)},
        {"step": TrustNorm(1e-3)},
        {"step": LevenbergMarquardt(1.0)},
        {"step": Backtracking()},
    ],
    ids=str,
)
def test_a_closure_that_draws_a_new_batch_is_refused(options: dict[str, Any]) -> None:
    """The losses of two batches cannot be compared, nor modeled by one of them."""
    model = net()
    opt, _ = made(model, **options)

    inputs, labels = batch(20)
    batches = iter(inputs.view(2, 10, -1).unbind())

    def evaluate_next_batch() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(next(batches)), labels[:10])
        loss.backward()
        return loss

    before = vector(model)
    with pytest.raises(pb.PullbackError, match="stochastic"):
        opt.step(evaluate_next_batch)
    assert torch.equal(vector(model), before)


@pytest.mark.parametrize("options", CONTROLLED)
def test_controlled_steps_need_a_closure(options: dict[str, Any]) -> None:
    opt, closure = made(net(), **options)
    closure()
    with refused("needs a closure", "look at the loss again", "step(closure)"):
        opt.step()
    plain, closure = made(net())
    closure.end, closure.at = lambda: None, 1
    assert plain.step(closure) is None  # the loss is not needed where nobody looks
    assert plain.info.took_statistics


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"step": QuadraticModel()},
        {"random": True},
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adaptive_damping_does_not_get_stuck(options: dict[str, Any]) -> None:
    """Also with dropout and batch normalization."""
    random = "random" in options
    if random:
        options = {}
    opt, closure = made(
        normalized_network() if random else net(), damping=Adaptive(1e-3), **options
    )
    losses = []
    accepted_steps = 0
    for _ in range(20):
        losses.append(float(opt.step(closure).detach()))
        accepted_steps += opt.info.accepted
    assert accepted_steps > 6
    assert losses[-1] < 0.75 * losses[0]


class Ridge(Damping):
    """A damping of one's own."""

    def find_shifts(self, means: Any, reference: Any, value: float) -> Any:
        return torch.full_like(means[0], value), torch.full_like(means[1], value)


def test_a_damping_of_ones_own() -> None:
    model = nn.Linear(3, 2, bias=False)
    x = torch.randn(9, 3)
    opt = kfac_of(model, 1.0, damping=Ridge(0.3), momentum=0.0, fisher="exact", kl_clip=None)
    start = model.weight.detach().clone()
    model(x).sum(1).sin().mean().backward()
    opt.step()
    assert model.weight.grad is not None
    want = solve_damped(x.T @ x / 9, model.weight.grad.T / 1.3, 0.3).T
    torch.testing.assert_close(start - model.weight.detach(), want)


@pytest.mark.parametrize("damping", [0.1, 1e-6])
def test_kl_clip_bounds_the_step_that_is_taken(damping: float) -> None:
    """ΔwᵀF̂Δw ≤ kl_clip after momentum, with the averages of now where F is refreshed."""
    model, limit = net(), 1e-3
    often = {"statistics_every": 1, "invert_every": 1}
    opt, closure = made(model, kl_clip=limit, momentum=0.9, damping=damping, **often)
    lengths, undamped = [], []
    for _ in range(30):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.step(closure)
        move = {n: before[n] - p.detach() for n, p in model.named_parameters()}
        squared_lengths = opt.blocks.compute_lengths(
            move, dict(model.named_parameters()), damped=True
        )
        lengths.append(float(sum(squared_lengths.values())))
        undamped.append(float(opt.squared_length(move)))
    assert max(undamped) <= limit * (1 + 1e-6)
    assert max(undamped) >= 0.99 * limit  # and is reached
    assert all(u <= d * (1 + 1e-6) for u, d in zip(undamped, lengths, strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"damping": Exact(0.1)}, {"ekfac": True}, {"momentum": 0.0}, {"joint": False}],
    ids=str,
)
def test_the_clips_lengths_are_those_of_the_moves(options: dict[str, Any]) -> None:
    """Two inner products and the last length give mᵀFm, between refreshes of F too."""
    model = net()
    rare = {"statistics_every": 5, "invert_every": 5, "kl_clip": 1e-3, "momentum": 0.9}
    opt, closure = made(model, **{**rare, **options})
    for _ in range(9):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        opt.step(closure)
        rate = opt.param_groups[0]["lr"]
        m = {n: (before[n] - p.detach()) / rate for n, p in model.named_parameters()}
        squared_lengths = opt.blocks.compute_lengths(m, dict(model.named_parameters()), damped=True)
        want = float(sum(squared_lengths.values()))
        ratio = 1.0
        if "length" in opt.state[model[0].weight]:
            ratio = float(opt.state[model[0].weight]["length"][1])
        assert rate**2 * ratio * want <= 1e-3 * (1 + 1e-9)
        if options.get("momentum") != 0.0:
            known = [opt.state[p]["length"][0] for p in model.parameters()]
            assert float(sum(known)) == pytest.approx(want, rel=1e-8)


BREAKS: dict[str, dict[str, Any]] = {
    "tikhonov": {"damping": Adaptive(0.1), "weight_decay": 0.1},
    "exact": {"damping": Adaptive(Exact(0.1))},
    "invariant": {"damping": Adaptive(Invariant(0.1))},
    "ekfac": {"damping": Adaptive(0.1), "ekfac": True},
    "rule": {"damping": Adaptive(0.1), "step": QuadraticModel()},
    "drawn": {"damping": Adaptive(0.1), "fisher": "mc", "statistics_every": 2},
}


ENDS: list[tuple[Callable[[], Any], str]] = [
    (lambda: None, "did not return the loss"),
    (lambda: (torch.zeros(()), 0), "did not return the loss"),
    (lambda: torch.zeros(3), "is not one number"),
    (lambda: torch.zeros((), dtype=torch.complex128), "is not one number"),
]
BROKEN = [
    *((name, 1, 2, interrupt, "") for name in BREAKS),
    *((name, steps, 2, interrupt, "") for name, steps in (("rule", 0), ("drawn", 2))),
    *(("tikhonov", 0, at, *end) for at, end in product((1, 2), ENDS)),
]


@pytest.mark.parametrize(("name", "steps", "at", "end", "what"), BROKEN)
def test_an_interrupt_or_a_strange_loss_at_either_evaluation_changes_nothing(
    name: str, steps: int, at: int, end: Callable[[], Any], what: str
) -> None:
    model = normalized_network()
    opt, closure = made(model, lr=0.1, **BREAKS[name])
    for _ in range(steps):
        opt.step(closure)
    info = opt.info
    closure.at = closure.calls + at
    closure.end = end
    if what:
        error = refused(what, "", "eturn")
    else:
        error = pytest.raises(KeyboardInterrupt)
    with expect_unchanged(model, opt), error:
        opt.step(closure)
    assert opt.info == info
    opt.step(closure)
    assert opt.info.accepted


class Square(torch.autograd.Function):
    """In the old style, which torch.func does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * ctx.saved_tensors[0] * g


def detach_backward(ctx: Any, g: Tensor) -> Tensor:
    """The cotangent leaves the graph on the way."""
    return Square.backward(ctx, g.detach())


once = torch.autograd.function.once_differentiable(Square.backward)  # and it says so


class Squared(nn.Module):
    def __init__(self, square: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(3, 5)
        self.two = nn.Linear(5, 4)
        self.square = square

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.square(self.one(x)))


def factors(model: nn.Module, steps: int, options: dict[str, Any]) -> list[float]:
    opt, closure = made(model, lr=0.1, **options)
    for _ in range(steps):
        opt.step(closure)
    return [opt.info.ratio or 0.0, opt.info.step_size or 0.0, opt.info.momentum or 0.0]


@pytest.mark.parametrize("options", CONTROLLED)
def test_custom_functions_give_the_same_by_two_reverse_passes(options: dict[str, Any]) -> None:
    one = Squared(torch.square)
    two = Squared(Square.apply)
    assert factors(one, 3, options) == pytest.approx(factors(two, 3, options), rel=1e-9)
    torch.testing.assert_close(vector(two), vector(one), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backward", [detach_backward, once])
def test_functions_without_any_second_derivative_are_refused(backward: Any) -> None:
    opaque: Any = type("Opaque", (Square,), {"backward": staticmethod(backward)})
    for options in CONTROLLED:
        model = Squared(opaque.apply)
        opt, closure = made(model, **options)
        words = ("J v cannot be computed", "neither a forward-mode", "leave out Adaptive")
        with expect_unchanged(model, opt), refused(*words):
            opt.step(closure)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.LSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.stack([x, -x, x * x], 1))[0].mean(1))


@pytest.mark.parametrize("options", CONTROLLED)
def test_fused_recurrent_kernels_are_left_aside(options: dict[str, Any]) -> None:
    """In single precision a CPU has kernels for them with one reverse pass and no more."""
    want = factors(Recurrent(), 1, options)
    assert factors(Recurrent().float(), 1, options) == pytest.approx(want, rel=2e-3)


def test_a_loss_that_has_grown_tenfold_is_said_once() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(16, 4)
    opt = kfac_of(model, 0.0, damping=1e-2, kl_clip=None)
    factor = iter([1.0, *[20.0] * 50])

    def closure() -> Tensor:
        opt.zero_grad()
        loss = next(factor) * model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        opt.step(closure)
    with pytest.warns(RuntimeWarning, match="above ten times that for the last 20 steps"):
        opt.step(closure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(30):
            opt.step(closure)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [DOUBLE, torch.bfloat16])
def test_a_shortened_step(momentum: float, dtype: torch.dtype) -> None:
    """m ← c(μm + Δ) and w ← (1 − η·decay)w − ηm, with and without a fused kernel."""
    start = torch.linspace(1, 2, 6, dtype=dtype)
    direction = torch.linspace(-1, 1, 6, dtype=dtype)
    buffer = torch.linspace(3, 1, 6, dtype=dtype)
    expected = 0.25 * (momentum * buffer + direction)
    w = start.clone()
    buffers = [buffer.clone()] if momentum else []
    update.apply_updates(
        [update.GroupUpdate(["w"], [w], [direction], buffers, 0.5, momentum, 0.5, 0.25)]
    )
    tolerance = 1e-12 if dtype == DOUBLE else 2e-2
    after = 0.75 * start - 0.5 * expected
    torch.testing.assert_close(w, after, rtol=tolerance, atol=tolerance)
    if momentum:
        torch.testing.assert_close(buffers[0], expected, rtol=tolerance, atol=tolerance)
