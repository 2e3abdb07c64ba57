"""Statistics taken by a second thread, while the backward pass goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac.statistics import aside, beside, sweep
from pullback.optim.kfac.statistics.aside import Aside


class Mixed(nn.Module):
    """Convolution, norms, attention and a shared linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.gain, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.conv(x))).transpose(1, 2)
        y = y + self.attend(self.norm(y), y, y, need_weights=False)[0]
        return self.head((self.mix(torch.tanh(self.mix(y))) * self.gain).mean(1))


def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aside, "fit", lambda like: True)
    monkeypatch.setattr(sweep, "waits", lambda x: True)


def trained(steps: int = 4, micro: int = 1, **options: Any) -> list[Tensor]:
    net = Mixed()
    opt = pb.KFAC(
        net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=1, invert_every=2,
        **options,
    )  # fmt: skip
    for i in range(steps):
        opt.zero_grad()
        for j in range(micro):
            g = torch.Generator().manual_seed(10 * i + j)
            x = torch.randn(5, 3, 7, dtype=torch.float64, generator=g)
            y = torch.randint(0, 4, (5,), generator=g)
            (F.cross_entropy(net(x), y) / micro).backward()
        opt.step()
        assert opt.info.taken
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("fisher", ["mc", "exact", "empirical"])
@pytest.mark.parametrize("micro", [1, 3])
def test_the_same_steps(monkeypatch: pytest.MonkeyPatch, fisher: str, micro: int) -> None:
    want = trained(fisher=fisher, micro=micro)
    on(monkeypatch)
    for p, q in zip(want, trained(fisher=fisher, micro=micro), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_large_cotangents_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    want = trained()
    on(monkeypatch)
    monkeypatch.setattr(aside, "_LARGE", 300)
    for p, q in zip(want, trained(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_two_calls_in_one_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> list[Tensor]:
        net = Mixed()
        opt = pb.KFAC(net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
        for i in range(3):
            opt.zero_grad()
            x = torch.randn(
                2, 5, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
            )
            loss = sum(F.cross_entropy(net(one), torch.zeros(5, dtype=torch.long)) for one in x)
            assert isinstance(loss, Tensor)
            loss.backward()
            opt.step()
        return [p.detach() for p in net.parameters()]

    want = run()
    on(monkeypatch)
    for p, q in zip(want, run(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_all_is_launched_when_the_backward_pass_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that inputs may be overwritten then."""
    on(monkeypatch)
    net, order = Mixed(), []
    assign: Callable[..., None] = sweep.Sweep.assign
    monkeypatch.setattr(
        sweep.Sweep, "assign", lambda self, *a: (assign(self, *a), order.append("assigned"))[0]
    )
    opt = pb.KFAC(net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    for _ in range(3):
        opt.zero_grad()
        x = torch.randn(5, 3, 7, dtype=torch.float64)
        F.cross_entropy(net(x), torch.zeros(5, dtype=torch.long)).backward()
        order.append("back")
        opt.step()
    assert order == ["assigned", "back"] * 3


def test_an_error_reaches_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    net, assign, fails = Mixed(), sweep.Sweep.assign, [False, True, False]
    opt = pb.KFAC(net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    x, y = torch.randn(5, 3, 7, dtype=torch.float64), torch.zeros(5, dtype=torch.long)

    def failing(self: Any, *args: Any) -> None:
        if fails[0]:
            raise ValueError("in another thread")
        assign(self, *args)

    monkeypatch.setattr(sweep.Sweep, "assign", failing)
    for _ in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        if fails[0]:
            with pytest.raises(ValueError, match="another thread"):
                loss.backward()
        else:
            loss.backward()
            opt.step()
        fails.pop(0)
    assert opt.info.taken


def test_an_error_in_the_first_of_two_calls_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch)
    net, assign, calls = Mixed(), sweep.Sweep.assign, []
    opt = pb.KFAC(net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
    x, y = torch.randn(2, 5, 3, 7, dtype=torch.float64), torch.zeros(5, dtype=torch.long)

    def failing(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # the first call of the second step
            raise ValueError("in another thread")
        assign(self, *args)

    monkeypatch.setattr(sweep.Sweep, "assign", failing)
    for i in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(net(x[0]), y) + F.cross_entropy(net(x[1]), y)
        if i == 1:
            with pytest.raises(ValueError, match="another thread"):
                loss.backward()
        else:
            loss.backward()
            opt.step()
            assert opt.info.taken


def test_the_thread_holds_nothing() -> None:
    work, held = Aside(), torch.zeros(3)
    work.on, seen = True, weakref.ref(held)
    work.do(lambda held=held: held.add_(1), held)
    work.join()
    del held
    gc.collect()
    assert seen() is None


def test_tasks_in_order_and_none_after_an_error() -> None:
    work, found = Aside(), []
    work.on = True
    for i in range(100):
        work.do(lambda i=i: found.append(i))
    work.join()
    assert found == [*range(100)]
    work.on = True
    work.do(lambda: found.clear())
    work.do(lambda: [][1])
    work.do(lambda: found.append("no"))
    with pytest.raises(IndexError):
        work.join()
    assert found == []
    work.join()


def test_sums_lie_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of linear layers of one width, in the layers' order, and with the same numbers."""

    def run() -> tuple[dict[str, Tensor], list[Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Linear(4, 3))
        opt = pb.KFAC(net, 0.0, likelihood=pb.likelihoods.Categorical(), statistics_every=1)
        sums: list[Any] = []
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(net(torch.ones(6, 4)), torch.zeros(6, dtype=torch.long)).backward()
            sums[:] = [t for s in opt._gatherer.pool.sums.values() for t in s.outputs.values()]
            opt.step()
        held = {k.names[0]: v for k, a in opt.curvature.averages.items() for v in a.value.values()}
        return held, sums

    want, _ = run()
    monkeypatch.setattr(beside, "stackable", lambda x: True)
    monkeypatch.setattr(sweep, "product_into", lambda out, x: torch.mm(x.T, x, out=out))
    got, sums = run()
    for name in want:
        torch.testing.assert_close(got[name], want[name])
    starts = [t.storage_offset() for t in sums if t.shape[-1] == 4]
    assert starts == [0, 16, 32]
