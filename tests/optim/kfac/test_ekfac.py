"""Corrected eigenvalues: when they serve, and that they survive saving and a change of dtype."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb
from pullback.optim.kfac import Exact


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def made(model: nn.Module, **options) -> pb.KFAC:
    return pb.KFAC(model, lr=0.1, likelihood=pb.likelihoods.Categorical(), **options)


def train(opt: pb.KFAC, model: nn.Module, steps: int, start: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(start)
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        x = torch.randn(16, 5, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.randint(0, 3, (16,), generator=generator)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("every", [1, 2])
def test_corrections_serve_where_every_statistics_step_inverts(every: int) -> None:
    schedule = {"statistics_every": every, "invert_every": every}
    one, two = net(), net()
    plain = train(made(one, damping=Exact(1e-1), **schedule), one, 6)
    opt = made(two, damping=1e-1, ekfac=True, **schedule)
    corrected = train(opt, two, 6)
    assert float((plain - corrected).norm()) > 1e-3 * float(plain.norm())


def test_corrected_eigenvalues_are_those_of_the_last_statistics() -> None:
    """With lr = 0 and the same batch the step's eigenvalues are second moments in the old bases."""
    model = net()
    opt = pb.KFAC(
        model, lr=0.0, likelihood=pb.likelihoods.Categorical(), fisher="exact", ekfac=True,
        statistics_every=1, invert_every=1000, damping=1e-2,
    )  # fmt: skip
    train(opt, model, 3)
    assert len(opt.curvature.corrections) == 2
    for key, held in opt.curvature.corrections.items():
        scale = opt.curvature.inverses[key].scale
        assert scale is not None
        assert torch.allclose(scale, 1 / (held.corrected()["values"] + 1e-2))


def test_it_resumes_to_the_same_bits() -> None:
    options = {"ekfac": True, "damping": 1e-1, "statistics_every": 2, "invert_every": 5}
    model = net()
    opt = made(model, **options)
    train(opt, model, 7)
    twin = copy.deepcopy(model)
    other = made(twin, **options)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert torch.equal(train(opt, model, 5, start=1), train(other, twin, 5, start=1))


def test_another_dtype_midway() -> None:
    model = net().float()
    opt = made(model, ekfac=True, damping=1e-1, statistics_every=1, invert_every=3)
    train(opt, model, 4)
    model.double()
    assert torch.isfinite(train(opt, model, 4)).all()


def test_parameters_outside_the_groups_are_named() -> None:
    model = net()
    opt = made(model, params=model[0].parameters(), statistics_every=1)
    before = model[2].weight.detach().clone()
    train(opt, model, 2)
    rows = {row.name: row for row in opt.coverage()}
    assert rows["2.weight"].block == "none"
    assert "not given" in rows["2.weight"].reason
    assert torch.equal(before, model[2].weight)


def test_functional_calls_with_other_parameters_are_no_statistics() -> None:
    model = net()
    opt = made(model, statistics_every=1)
    others = {n: (2 * p).detach().requires_grad_() for n, p in model.named_parameters()}
    x = torch.randn(4, 5, dtype=torch.float64)
    torch.func.functional_call(model, others, (x,)).sum().backward()
    train(opt, model, 1)
    assert opt.info.taken


def test_events_scale_the_gram_with_the_loss() -> None:
    """A loss that adds up pixels and averages images, against one that averages both."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.rand(8, 4, dtype=torch.float64)
    steps = []
    for event in (0, 1):
        torch.manual_seed(1)
        model = nn.Linear(5, 4).double()
        opt = pb.KFAC(
            model, lr=1.0, likelihood=pb.likelihoods.Bernoulli(event=event), fisher="exact",
            damping=0.0, momentum=0.0, statistics_every=1, invert_every=1,
        )  # fmt: skip
        loss = F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        (loss / (len(x) if event else y.numel())).backward()
        opt.step()
        steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*steps, rtol=1e-10)
    with pytest.raises(pb.PullbackError, match="event"):
        pb.likelihoods.Bernoulli(event=-1)


def test_a_layer_without_factors_is_a_diagonal() -> None:
    from pullback.maps.layers import REGISTRY, Layer, RowsBlock

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    class GainLayer(Layer):
        def block(self, names, uses) -> RowsBlock:
            raise AssertionError("not asked for")

    REGISTRY[Gain] = GainLayer()
    try:
        model = nn.Sequential(nn.Linear(5, 6), Gain(), nn.Linear(6, 3)).double()
        opt = made(model, statistics_every=1, damping=1.0)
        assert [r.block for r in opt.coverage()][2] == "diagonal"
        train(opt, model, 2)
        assert [r.block for r in opt.coverage()][2] == "diagonal"
    finally:
        del REGISTRY[Gain]
