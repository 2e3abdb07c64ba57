"""Steps between statistics as recorded programs: what is recorded stays valid, or is recorded anew.

On a CPU a fake recorder stands in for CUDA graphs: it keeps the work of the third time for each key
and set of addresses, with the objects it was bound to, and runs that from then on.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac.stepping import steady

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Fake:
    """A recorder for the CPU, which counts."""

    recorded: ClassVar[list[Hashable]] = []
    replayed = 0

    def __init__(self) -> None:
        self.off = False
        self._graphs: dict[Hashable, Callable[[], None]] = {}
        self._seen: dict[Hashable, int] = {}

    def run(self, key: Hashable, tensors: Sequence[Tensor], work: Callable[[], None]) -> None:
        place = (key, tuple(t.data_ptr() for t in tensors))
        self._seen[place] = self._seen.get(place, 0) + 1
        if self._seen[place] == 3:
            self._graphs[place] = work
            Fake.recorded.append(key)
        if place in self._graphs:
            Fake.replayed += 1
            self._graphs[place]()
        else:
            work()


@pytest.fixture
def recorder(monkeypatch) -> type[Fake]:
    monkeypatch.setattr(steady, "usable", lambda params: True)
    monkeypatch.setattr(steady, "Replay", Fake)
    Fake.recorded, Fake.replayed = [], 0
    return Fake


class Net(nn.Module):
    """Convolutions, a norm, linear layers of one shape, and a plain parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 3, bias=False)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x))).mean((2, 3))
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.gain)


def net(dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    return Net().to(dtype)


def built(model: nn.Module, **options: Any) -> pb.KFAC:
    given: dict[str, Any] = {
        "lr": 0.05, "damping": 0.1, "statistics_every": 6, "invert_every": 12, **options,
    }  # fmt: skip
    return pb.KFAC(model, likelihood=pb.likelihoods.Categorical(), **given)


def batch(i: int, like: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    x, y = torch.randn(6, 2, 4, 4, generator=g, dtype=torch.float64), torch.arange(6) % 3
    return x.to(like), y.to(like.device)


def moved_by(opt: pb.KFAC) -> list[Tensor]:
    """Parameters and momentum."""
    params = list(opt.model.parameters())
    held = [opt.state[p]["momentum"] for p in params if "momentum" in opt.state[p]]
    return [*params, *held]


def train(
    model: nn.Module,
    opt: pb.KFAC,
    steps: int,
    start: int = 0,
    before: Callable[[int], None] = lambda i: None,
) -> Tensor:
    for i in range(start, start + steps):
        before(i)
        x, y = batch(i, next(model.parameters()))
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return torch.cat([t.detach().flatten() for t in moved_by(opt)])


def reference(steps: int, before: Any = None, **options: Any) -> Tensor:
    """Without recording: the step that waits."""
    model = net()
    opt = built(model, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steady, "usable", lambda params: False)
        return train(model, opt, steps, before=(lambda i: None) if before is None else before(opt))


def near(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


OPTIONS = [
    {},
    {"momentum": 0.0},
    {"weight_decay": 0.1, "kl_clip": 1e-4},
    {"ekfac": True},
    {"joint": False},
    {"damping": pb.optim.kfac.Exact(0.1)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_training(recorder, options) -> None:
    want = reference(30, **options)
    model = net()
    assert near(train(model, built(model, **options), 30), want)
    assert len(recorder.recorded) == 1
    assert recorder.replayed >= 18  # of 25 plain steps; inverses were renewed four times


def test_a_schedule_replays_in_single_precision(recorder) -> None:
    def schedule(opt: pb.KFAC) -> Callable[[int], None]:
        def before(i: int) -> None:
            opt.param_groups[0]["lr"] = 0.05 / (1 + i)

        return before

    model = net(torch.float32)
    opt = built(model, weight_decay=0.1)
    got = train(model, opt, 20, before=schedule(opt))
    assert len(recorder.recorded) == 1
    want = reference(20, schedule, weight_decay=0.1)
    assert torch.allclose(got.double(), want, rtol=1e-3, atol=1e-4)


def test_a_schedule_in_double_precision_is_exact(recorder) -> None:
    def schedule(opt: pb.KFAC) -> Callable[[int], None]:
        def before(i: int) -> None:
            opt.param_groups[0]["lr"] = 0.05 / (1 + i)
            opt.param_groups[0]["momentum"] = 0.9 - 0.02 * i

        return before

    model = net()
    opt = built(model)
    assert near(train(model, opt, 20, before=schedule(opt)), reference(20, schedule))
    assert not recorder.recorded


def test_rates_as_tensors(recorder) -> None:
    model = net()
    opt = built(model)
    opt.param_groups[0]["lr"] = torch.tensor(0.05, dtype=torch.float64)
    assert near(train(model, opt, 12), reference(12))


def test_freezing_and_missing_gradients_record_anew(recorder) -> None:
    def freezing(opt: pb.KFAC) -> Callable[[int], None]:
        def before(i: int) -> None:
            held: Any = opt.model
            held.first.bias.requires_grad_(not 13 <= i < 24)

        return before

    model = net()
    opt = built(model)
    assert near(train(model, opt, 40, before=freezing(opt)), reference(40, freezing))
    assert len(recorder.recorded) >= 2


def test_moved_memory_records_anew(recorder) -> None:
    model = net()
    opt = built(model)

    def before(i: int) -> None:
        if i == 10:
            for p in model.parameters():
                p.data = p.data.clone()
        if i == 16:
            own = opt.state[model.gain]
            own["momentum"] = own["momentum"].clone()

    got = train(model, opt, 24, before=before)
    assert near(got, reference(24))
    assert len(recorder.recorded) >= 2


def test_groups_with_their_own_rates(recorder) -> None:
    def grouped(model: Any) -> list[dict[str, Any]]:
        some = [model.conv.weight, model.gain]
        rest = [p for p in model.parameters() if not any(p is q for q in some)]
        return [{"params": some, "lr": 0.01, "momentum": 0.5}, {"params": rest}]

    results = []
    for on in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steady, "usable", lambda params, on=on: on)
            model = net()
            results.append(train(model, built(model, params=grouped(model), kl_clip=1e-3), 20))
    assert near(*results)
    assert recorder.recorded


def test_resuming_copying_and_pickling(recorder) -> None:
    want = reference(30)
    model = net()
    opt = built(model)
    train(model, opt, 15)
    twin = copy.deepcopy(opt)
    again = pickle.loads(pickle.dumps(opt))
    fresh = net()
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    loaded = built(fresh)
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one in (opt, twin, again, loaded):
        assert near(train(one.model, one, 15, start=15), want)


def test_loading_into_one_that_has_recorded(recorder) -> None:
    model = net()
    opt = built(model)
    train(model, opt, 9)
    saved, at = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    want = train(model, opt, 9, start=9)
    train(model, opt, 5, start=40)
    model.load_state_dict(at)
    opt.load_state_dict(saved)
    assert torch.equal(train(model, opt, 9, start=9), want)


def test_what_was_given_out_stays_as_it_was(recorder) -> None:
    model = net()
    opt = built(model, ekfac=True)
    train(model, opt, 10)
    gram = opt.gram()
    before = gram.dense().clone()
    saved = opt.state_dict()
    kept = copy.deepcopy(saved["state"]["pullback"]["curvature"]["blocks"][0]["inverse"]["left"])
    train(model, opt, 10, start=10)
    assert torch.equal(
        saved["state"]["pullback"]["curvature"]["blocks"][0]["inverse"]["left"], kept
    )
    assert torch.equal(gram.dense(), before)


def test_broken_gradients_move_nothing(recorder) -> None:
    model = net()
    opt = built(model, weight_decay=0.1)
    train(model, opt, 10)
    x, y = batch(10, model.gain)
    before = [
        t.clone()
        for t in [*model.parameters(), *(opt.state[p]["momentum"] for p in model.parameters())]
    ]
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model.gain.grad[0] = torch.inf
    opt.step()
    after = moved_by(opt)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert not opt.info.accepted
    train(model, opt, 5, start=10)
    assert opt.info.accepted


def test_other_layouts_in_memory(recorder) -> None:
    want = reference(12)
    model = net().to(memory_format=torch.channels_last)
    assert near(train(model, built(model), 12), want)


def test_large_models_are_not_copied(recorder, monkeypatch) -> None:
    monkeypatch.setattr(steady, "_LARGEST", 10)
    model = net()
    assert near(train(model, built(model), 12), reference(12))
    assert not recorder.recorded


def test_situations_that_alternate_are_left_alone(recorder) -> None:
    def alternating(opt: pb.KFAC) -> Callable[[int], None]:
        def before(i: int) -> None:
            opt.param_groups[0]["params"][-1].requires_grad_(i % 2 == 0)

        return before

    model = net()
    opt = built(model, statistics_every=1000)
    train(model, opt, 20, before=alternating(opt))
    assert not recorder.recorded


def test_statistics_steps_are_replayed_too(recorder) -> None:
    want = reference(20, statistics_every=2, invert_every=4)
    model = net()
    opt = built(model, statistics_every=2, invert_every=4)
    taken = []

    def before(i: int) -> None:
        taken.append(opt.info.taken)

    assert near(train(model, opt, 20, before=before), want)
    assert taken[1:] == [i % 2 == 0 for i in range(19)]
    assert recorder.replayed >= 14


def test_statistics_that_are_not_finite_are_reported(recorder, monkeypatch) -> None:
    model = net()
    opt = built(model, statistics_every=1)
    train(model, opt, 6)
    inner = opt._gatherer.averages

    def broken(*args: Any) -> Any:
        found = inner(*args)
        next(iter(next(iter(found.values())).values())).fill_(torch.nan)
        return found

    monkeypatch.setattr(opt._gatherer, "averages", broken)
    train(model, opt, 1, start=6)
    assert opt.info.accepted
    assert not opt.info.taken
    assert "not finite" in opt.info.notes["statistics"]


@cuda
@pytest.mark.cuda
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_graphs_give_the_same_bits(monkeypatch, dtype, options) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = []
    for graphs in (True, False):
        with monkeypatch.context() as patch:
            if not graphs:
                patch.setattr(steady.Replay, "run", lambda self, key, tensors, work: work())
            model = net(dtype).cuda()
            opt = built(model, **options)
            results.append(train(model, opt, 30))
            assert bool(opt._steady._replay._graphs) == graphs
            assert not opt._steady._replay.off
    assert torch.equal(*results)


@cuda
@pytest.mark.cuda
def test_plain_steps_wait_for_nothing() -> None:
    model = net(torch.float32).cuda()
    opt = built(model, statistics_every=1000, kl_clip=1e-3, weight_decay=0.1)
    train(model, opt, 2)
    x, y = batch(0, model.gain)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(8):
            if i == 4:  # recorded by now, which waits
                opt.param_groups[0]["lr"] = 0.01
            torch.cuda.set_sync_debug_mode("default" if i < 4 else "error")
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert opt.info.accepted
