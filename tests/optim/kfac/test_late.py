"""Steps that do not wait for the device: it moves nothing by itself if a gradient is broken."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac.statistics.proof import Proof
from pullback.optim.kfac.stepping import steady


def trained(model: nn.Module, steps: int, broken: tuple[int, ...] = (), **options):
    model = copy.deepcopy(model)
    opt = pb.KFAC(
        model,
        lr=0.1,
        likelihood=pb.likelihoods.Categorical(),
        damping=1.0,
        statistics_every=3,
        **options,
    )
    generator = torch.Generator().manual_seed(0)
    accepted = []
    for i in range(steps):
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 3, (8,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if i in broken:
            next(model.parameters()).grad[0, 0] = torch.nan
        opt.step()
        if i % 2:
            accepted.append(opt.info.accepted)
    state = [opt.state[p]["momentum"] for p in model.parameters()]
    return torch.cat([t.detach().flatten() for t in [*model.parameters(), *state]]), accepted


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def fused(monkeypatch) -> None:
    monkeypatch.setattr(steady, "usable", lambda params: True)


def test_the_same_steps_as_with_waiting(monkeypatch) -> None:
    for options in ({}, {"weight_decay": 0.1, "kl_clip": 1e-3}):
        want, _ = trained(net(), 8, **options)
        with monkeypatch.context() as patch:
            fused(patch)
            got, accepted = trained(net(), 8, **options)
        assert torch.allclose(got, want, rtol=1e-6, atol=1e-9)
        assert all(accepted)


def test_broken_gradients_move_nothing(monkeypatch) -> None:
    want, one = trained(net(), 9, broken=(1, 4, 5), weight_decay=0.1)
    fused(monkeypatch)
    got, two = trained(net(), 9, broken=(1, 4, 5), weight_decay=0.1)
    assert torch.allclose(got, want, rtol=1e-6, atol=1e-9)
    assert one == two
    assert not all(two)


def test_only_on_one_cuda_device() -> None:
    assert not steady.usable([torch.zeros(3)])
    assert not steady.usable([torch.zeros(3), torch.zeros(3).double()])


def test_the_proof_looks_at_some_samples_at_a_time(monkeypatch) -> None:
    from pullback.optim.kfac.statistics import proof

    def coverage() -> list[Tensor]:
        model = net()
        opt = pb.KFAC(model, lr=0.1, likelihood=pb.likelihoods.Categorical())
        F.cross_entropy(model(torch.randn(8, 5).double()), torch.arange(8) % 3).backward()
        opt.step()
        return [row.block for row in opt.coverage()]

    want = coverage()
    monkeypatch.setattr(proof, "_ENTRIES", 7)
    assert coverage() == want
    assert all("kronecker" in block for block in want)
    assert Proof is proof.Proof
