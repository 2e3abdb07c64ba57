"""Statistics taken along the user's own backward pass are those of a second pass."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pullback as pb
from pullback.grams.kronecker.packed_matrix import get_entries, unpack
from pullback.maps.record import ForwardRecord
from pullback.optim.kfac.statistics import cotangents, structure
from pullback.optim.kfac.statistics.cotangents import CotangentPass
from tests.kfac_options import kfac_of
from tests.pairs import each_once

from .common import DOUBLE

STEPS = 4
EIGENBASIS = {"rule": "eigenbasis"}
NATURAL = {"rule": "natural", "fisher": "empirical", "kl_clip": None, "damping": 0.1}


class Wired(nn.Module):
    """Layers, and a function that says how they are used."""

    def __init__(self, use: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.use = use
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *args: Tensor) -> Any:
        return self.use(self, *args)


def _tied() -> nn.Module:
    def use(m: Any, x: Tensor) -> Tensor:
        return m.last(torch.tanh(m.back(torch.tanh(m.there(x)))))

    model: Any = Wired(use, there=nn.Linear(3, 3), back=nn.Linear(3, 3), last=nn.Linear(3, 4))
    model.back.weight = model.there.weight
    return model


def _recurrent(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 5)
    for _ in range(3):
        h = torch.tanh(m.inner(h) + m.first(x))
    return m.last(h)


def _twice(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.first(x)) + m.first(x.flip(0)))


def _two_outputs(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.first(x))
    return m.last(h), m.other(h)


def _with_hidden(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.tanh(m.first(x))
    return m.last(h), h


def _at_positions(m: Any, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    return m.last(torch.tanh(m.first(x) + m.place(positions))).mean(1)


def _checkpoint(m: Any, x: Tensor) -> Any:
    return m.last(checkpoint(lambda t: torch.tanh(m.first(t)), x, use_reentrant=False))


def _clamp_in_hook(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return m.last(h)


def _two_layers(use: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Wired(use, first=nn.Linear(3, 5), last=nn.Linear(5, 4))


def _convolution(groups: int) -> nn.Module:
    body = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=groups), nn.ReLU()
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(16, 4))


def _mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), *between, nn.Tanh(), nn.Linear(5, 4))


def _labels(*shape: int) -> Tensor:
    return torch.randint(0, 4, shape)


def _cross_entropy_with_ignored(z: Tensor, y: Tensor) -> Tensor:
    y = y.masked_fill(torch.arange(y.numel()).view(y.shape) % 3 == 0, -100)
    return F.cross_entropy(z.flatten(0, -2), y.flatten())


def _first(z: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(z[0], y)


def _both(z: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(z[0], y) + z[1].square().mean()


@dataclass
class Case:
    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor] = F.cross_entropy
    inputs: tuple[int, ...] = (8, 3)
    labels: tuple[int, ...] = (8,)
    options: dict[str, Any] = field(default_factory=dict)
    #: how many of the passes are measured along the way: all but the first, or none
    along: int = STEPS - 1


IMAGES: Any = {"inputs": (8, 2, 4, 4)}
SEQUENCES: Any = {"inputs": (4, 6, 3), "labels": (4, 6), "loss": _cross_entropy_with_ignored}
PICKED: Any = {"options": {"output": 0}}
_THREE = {"first": lambda: nn.Linear(3, 5), "last": lambda: nn.Linear(5, 4)}
CASES = {
    "mlp": Case(_mlp),
    "convolution": Case(lambda: _convolution(1), **IMAGES),
    "groups": Case(lambda: _convolution(2), **IMAGES),
    "layer norm": Case(lambda: _mlp(nn.LayerNorm(5))),
    "tied weights": Case(_tied),
    "recurrent": Case(
        lambda: Wired(_recurrent, **{n: k() for n, k in _THREE.items()}, inner=nn.Linear(5, 5))
    ),
    "used twice": Case(_two_layers(_twice)),
    "sequences": Case(_mlp, **SEQUENCES),
    "reduced places": Case(_mlp, **SEQUENCES, options={"sharing": "reduce"}),
    "corrected eigenvalues": Case(_mlp, options={"ekfac": True}),
    "one sample": Case(_mlp, inputs=(1, 3), labels=(1,)),
    "checkpoint": Case(_two_layers(_checkpoint)),
    "a sum": Case(
        _mlp,
        lambda z, y: F.cross_entropy(z, y, reduction="sum"),
        options={"reduction": "sum"},
    ),
    "clipped by a hook": Case(_two_layers(_clamp_in_hook)),
    "one of two outputs": Case(_two_layers(_with_hidden), _first, **PICKED),
    # what the user's pass does not give: another pass does
    "both outputs": Case(_two_layers(_with_hidden), _both, **PICKED, along=0),
    "batch norm": Case(lambda: _mlp(nn.BatchNorm1d(5)), along=0),
    "positions": Case(
        lambda: Wired(
            _at_positions, **{n: k() for n, k in _THREE.items()}, place=nn.Embedding(6, 5)
        ),
        inputs=(4, 6, 3),
        labels=(4,),
        along=0,
    ),
    "compound": Case(
        lambda: Wired(
            lambda m, x: m.last(m.inner(x)[0][:, -1]),
            inner=nn.LSTM(3, 5, batch_first=True),
            last=nn.Linear(5, 4),
        ),
        inputs=(4, 6, 3),
        labels=(4,),
        along=0,
    ),
}


def _batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(case.inputs, dtype=DOUBLE), _labels(*case.labels)) for _ in range(STEPS)]


def _sums(opt: pb.KFAC) -> dict[Any, Tensor]:
    averages = opt.blocks.averages
    sums = {}
    for key, average in averages.items():
        sums |= {(key, side): unpack(factor) for side, factor in average.value.items()}
    return sums


def _one_by_one(opt: pb.KFAC, model: Any, case: Case) -> None:
    for x, y in _batches(case):
        opt.zero_grad()
        case.loss(model(x), y).backward()
        opt.step()


def _accumulate(opt: pb.KFAC, model: Any, case: Case) -> None:
    for _ in range(2):
        opt.zero_grad()
        for x, y in _batches(case):
            case.loss(model(x), y).backward()
        opt.step()


def _forward_first(opt: pb.KFAC, model: Any, case: Case) -> None:
    for _ in range(2):
        losses = [case.loss(model(x), y) for x, y in _batches(case)]
        for loss in losses:
            loss.backward()
        opt.step()
        opt.zero_grad()


def _together(opt: pb.KFAC, model: Any, case: Case) -> None:
    for _ in range(2):
        opt.zero_grad()
        torch.stack([case.loss(model(x), y) for x, y in _batches(case)]).sum().backward()
        opt.step()


def _scale_loss(opt: pb.KFAC, model: Any, case: Case) -> None:
    for x, y in _batches(case):
        opt.zero_grad()
        opt.grad_scaler.scale(case.loss(model(x), y)).backward()
        opt.grad_scaler.step(opt)
        opt.grad_scaler.update()


@pytest.fixture
def along(monkeypatch: Any) -> list[bool]:
    """Whether each pass was measured along the user's own, in order."""
    along = []
    measure = structure.BlockStructure.measure_user_pass

    def measure_and_note(self: Any, *args: Any, is_trial: bool = False) -> bool:
        is_along = measure(self, *args, is_trial=is_trial)
        if not is_trial:
            along.append(is_along)
        return is_along

    monkeypatch.setattr(structure.BlockStructure, "measure_user_pass", measure_and_note)
    return along


def _run(loop: Any, case: Case, **options: Any) -> dict[Any, Tensor]:
    torch.manual_seed(0)
    model = case.model().to(DOUBLE)
    settings = {"lr": 1e-3, "statistics_every": 1, "invert_every": 1} | case.options | options
    opt = kfac_of(model, likelihood=pb.likelihoods.Categorical(), **settings)
    loop(opt, model, case)
    assert opt.info.took_statistics
    return _sums(opt)


def _compare(monkeypatch: Any, loop: Any, case: Case, **options: Any) -> None:
    actual = _run(loop, case, **options)
    monkeypatch.setattr(structure.BlockStructure, "measure_user_pass", lambda *_, **__: False)
    want = _run(loop, case, **options)
    assert actual.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-12, atol=1e-14, msg=str(key))


@pytest.mark.parametrize("name", CASES)
def test_same_sums(name: str, along: list[bool], monkeypatch: Any) -> None:
    _compare(monkeypatch, _one_by_one, CASES[name], **NATURAL)
    assert sum(along) == CASES[name].along


@pytest.mark.parametrize(
    ("name", "loop"),
    each_once(
        ["mlp", "used twice", "sequences", "batch norm"], [_accumulate, _forward_first, _together]
    ),
)
def test_several_passes_before_a_step(
    name: str, loop: Any, along: list[bool], monkeypatch: Any
) -> None:
    _compare(monkeypatch, loop, CASES[name], **NATURAL)
    # the first step compares
    if loop is not _together:
        passes = 2 * STEPS
    else:
        passes = STEPS
    assert sum(along) >= (passes - STEPS if name != "batch norm" else 0)


def test_a_scaled_loss(along: list[bool], monkeypatch: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _compare(monkeypatch, _scale_loss, CASES["mlp"], **NATURAL, grad_scaler=scaler)
    assert sum(along) == STEPS - 1


def test_another_head_that_is_not_measured(along: list[bool], monkeypatch: Any) -> None:
    # its weight has no statistics; the rule is for matrices, so no diagonal is asked for
    def model() -> nn.Module:
        layers = {n: k() for n, k in _THREE.items()}
        return Wired(_two_outputs, **layers, other=nn.Linear(5, 2))

    _compare(monkeypatch, _one_by_one, Case(model, _first, options=EIGENBASIS | {"output": 0}))
    assert sum(along) == STEPS - 1


def test_a_head_that_joins_later(along: list[bool]) -> None:
    layers = {n: k() for n, k in _THREE.items()}
    model = Wired(_two_outputs, **layers, other=nn.Linear(5, 2))
    with pb.KFAC(model, output=0, statistics_every=1) as opt:
        for step in range(6):
            opt.zero_grad()
            (_first if step < 3 else _both)(model(torch.randn(8, 3)), _labels(8)).backward()
            opt.step()
    assert along == [False, True, True, False, False, False]


class _Counter(torch.autograd.Function):
    """The identity; counts the passes that come back."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        _Counter.passes += 1
        return g


def test_one_backward_pass() -> None:
    model = _two_layers(lambda m, x: m.last(_Counter.apply(torch.tanh(m.first(x)))))()
    counts = []
    with pb.KFAC(model, statistics_every=1) as opt:
        for _ in range(4):
            _Counter.passes = 0
            opt.zero_grad()
            F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
            opt.step()
            assert opt.info.took_statistics
            counts.append(_Counter.passes)
    assert counts[1:] == [1, 1, 1]


def test_mode_of_modules_is_compared_anew(along: list[bool]) -> None:
    model: Any = _mlp(nn.BatchNorm1d(5))
    with pb.KFAC(model, rule="eigenbasis", statistics_every=1) as opt:
        for step in range(5):
            model[1].train(step >= 3)
            opt.zero_grad()
            F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
            opt.step()
    assert along == [False, True, True, False, False]


def test_autocast(along: list[bool], monkeypatch: Any) -> None:
    def sums() -> dict[Any, Tensor]:
        torch.manual_seed(0)
        model = _mlp()
        opt = pb.KFAC(model, lr=1e-3, statistics_every=1, invert_every=1)
        for x, y in _batches(CASES["mlp"]):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                F.cross_entropy(model(x.float()), y).backward()  # some call backward inside
            opt.step()
        return _sums(opt)

    along_the_pass = sums()
    assert sum(along) == STEPS - 1
    monkeypatch.setattr(structure.BlockStructure, "measure_user_pass", lambda *_, **__: False)
    for key, value in sums().items():
        torch.testing.assert_close(along_the_pass[key], value, rtol=1e-5, atol=1e-8, msg=str(key))


def _known(**options: Any) -> tuple[Any, pb.KFAC]:
    """A model whose passes are measured along the user's from now on."""
    torch.manual_seed(0)
    model: Any = _mlp()
    opt = kfac_of(model, **{"statistics_every": 1, **options})
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
        opt.step()
    opt.zero_grad()
    return model, opt


def _alive(*types: type) -> int:
    return sum(type(o) in types for o in gc.get_objects())


def test_nothing_is_kept_after_the_pass(along: list[bool]) -> None:
    model, opt = _known()
    gc.collect()
    gc.disable()
    try:
        hidden: list[Any] = []
        handle = model[1].register_forward_hook(lambda *a: hidden.append(weakref.ref(a[-1])))
        loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
        handle.remove()
        loss.backward(retain_graph=True)
        assert along[-1]
        assert _alive(cotangents.UserPass, CotangentPass, ForwardRecord) == 0
        assert hidden[0]() is not None  # the user keeps the graph, and nobody else
        del loss
        assert hidden[0]() is None
    finally:
        gc.enable()
    opt.close()


def test_a_graph_that_is_dropped(along: list[bool]) -> None:
    model, opt = _known()
    gc.collect()
    gc.disable()
    try:
        loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
        del loss
        assert _alive(cotangents.UserPass, CotangentPass, ForwardRecord) == 0
    finally:
        gc.enable()
    F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
    opt.step()
    assert opt.info.took_statistics


def test_a_kept_graph_measures_once(along: list[bool]) -> None:
    model, opt = _known()
    loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
    loss.backward(retain_graph=True)
    pool = opt._capture.pool
    samples = float(pool.samples)
    factors = list(chain.from_iterable(block.values.values() for block in pool.sums.values()))
    before = [get_entries(t).clone() for t in factors]
    loss.backward()
    assert float(pool.samples) == samples == 8
    factors = chain.from_iterable(block.values.values() for block in pool.sums.values())
    after = [get_entries(t) for t in factors]
    assert all(map(torch.equal, before, after))
    opt.step()
    assert opt.info.took_statistics


@pytest.mark.parametrize("clear", [False, True])
def test_a_pass_that_fails(clear: bool, along: list[bool]) -> None:
    model, opt = _known()

    def fail(_: Tensor) -> None:
        raise ValueError("stop")

    h: list[Tensor] = []
    handle = model[1].register_forward_hook(lambda *a: h.append(a[-1]))
    loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
    handle.remove()
    h.pop().register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        loss.backward()
    assert _alive(cotangents.UserPass) == 0
    if clear:  # an ordinary pass follows, while the first graph is still there
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
        assert float(opt._capture.pool.samples) == 8
    opt.step()
    assert opt.info.took_statistics is clear
    assert torch.isfinite(model[0].weight).all()


def test_an_input_that_is_overwritten(along: list[bool]) -> None:
    model, opt = _known()
    x = torch.randn(8, 3)
    # autograd has copies of its own, and does not mind
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        z = model(x)
    z.grad_fn.register_prehook(lambda _: (x.zero_(), None)[1])
    F.cross_entropy(z, _labels(8)).backward()
    assert along[-1]
    opt.step()
    assert not opt.info.took_statistics


def test_a_gradient_with_a_graph_takes_a_second_pass(along: list[bool]) -> None:
    model, opt = _known()
    loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
    before = len(along)
    loss.backward(create_graph=True)
    assert len(along) == before
    opt.step()
    assert opt.info.took_statistics


def test_gradients_by_autograd_grad(along: list[bool]) -> None:
    model, opt = _known()
    params = list(model.parameters())
    loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    assert along[-1]
    opt.step()
    assert opt.info.took_statistics
    # of the last layer alone: the others are measured by a second pass
    loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
    torch.autograd.grad(loss, params[-2:])
    assert not along[-1]
    opt.step()
    assert opt.info.took_statistics


def test_passes_that_do_not_go_as_foreseen_are_left_out(
    along: list[bool], monkeypatch: Any
) -> None:
    model, opt = _known()
    routes = opt._capture.structure._routes
    monkeypatch.setattr(cotangents, "_observe", lambda *_: None)
    F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
    assert along[-1]
    assert not routes
    opt.step()
    assert not opt.info.took_statistics
    monkeypatch.undo()
    F.cross_entropy(model(torch.randn(8, 3)), _labels(8)).backward()
    opt.step()
    assert opt.info.took_statistics
    assert len(routes) == 1


def test_close_while_a_pass_waits(along: list[bool]) -> None:
    model, opt = _known()
    loss = F.cross_entropy(model(torch.randn(8, 3)), _labels(8))
    count = len(along)
    opt.close()
    loss.backward()
    assert len(along) == count
