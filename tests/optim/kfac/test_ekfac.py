"""Corrected eigenvalues: that they are second moments in the eigenbases, and when they serve."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pullback as pb
from pullback.optim.kfac import Exact

from ..common import assert_close, closure_of, flat
from .common import DOUBLE, batch, kfac, net, train, vector


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(DOUBLE)


@pytest.mark.parametrize("interval", [1, 2])
def test_corrections_serve_where_every_statistics_step_inverts(interval: int) -> None:
    ends = []
    for options in ({"damping": Exact(0.1)}, {"damping": 0.1, "ekfac": True}):
        torch.manual_seed(0)
        model = net()
        opt = kfac(model, statistics_every=interval, invert_every=interval, lr=0.1, **options)
        train(opt, model, 6)
        ends.append(vector(model))
    assert (ends[0] - ends[1]).norm() > 1e-3 * ends[0].norm()


def test_eigenvalues_are_second_moments_of_gradients_in_the_eigenbases() -> None:
    """Of a linear layer, from autograd alone: the step of the second time is Q(QᵀVP/(s + λ))Pᵀ."""
    model, x, y = nn.Linear(3, 4), *batch()
    options = {"statistics_every": 1, "invert_every": 1000, "momentum": 0.0, "ema": 0.0}
    opt = kfac(model, fisher="exact", ekfac=True, damping=1e-2, lr=0.0, **options)
    for lr in (0.0, 1.0):
        opt.param_groups[0]["lr"] = lr
        p = model(x).detach().softmax(1)
        before = vector(model)
        opt.step(closure_of(opt, model, x, y, F.cross_entropy))
    m = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    a = torch.cat([x, torch.ones(8, 1)], 1)
    left = torch.linalg.eigh(m.mean(0))[1]
    right = torch.linalg.eigh(a.T @ a / 8)[1]
    values = torch.einsum("noq,op,qp,ni->pi", m, left, left, (a @ right).square()) / 8
    weight, bias = (p.grad for p in model.parameters())
    v = torch.cat([weight, bias[:, None]], 1)  # pyright: ignore[reportOptionalSubscript]
    want = left @ ((left.T @ v @ right) / (values + 1e-2)) @ right.T
    assert_close(before - vector(model), flat([want[:, :3], want[:, 3]]), 1e-8)


def test_rows_of_a_transposed_convolution_belong_to_its_input() -> None:
    """As a 1×1 kernel it is a linear layer with the transposed weight, with the same steps."""
    torch.manual_seed(0)
    weight = torch.randn(5, 3)
    x = torch.randn(8, 5)
    y = torch.randn(8, 3)
    linear = nn.Linear(5, 3, bias=False)
    conv = nn.ConvTranspose1d(5, 3, 1, bias=False)
    grams = []
    for model in (linear, nn.Sequential(nn.Unflatten(1, (5, 1)), conv, nn.Flatten())):
        with torch.no_grad():
            linear.weight.copy_(weight.T)
            conv.weight.copy_(weight[..., None])
        opt = kfac(model, ekfac=True, lr=0.1, statistics_every=1, invert_every=3, fisher="exact",
                   likelihood=pb.likelihoods.MSE())  # fmt: skip
        for _ in range(6):
            opt.step(closure_of(opt, model, x, y, F.mse_loss))
        grams.append((conv.weight[..., 0] if grams else linear.weight.T).detach().clone())
    assert_close(grams[0], grams[1], 1e-8)


def test_events_scale_the_gram_with_the_loss() -> None:
    """A loss that adds up pixels and averages images, against one that averages both."""
    x = torch.randn(8, 5)
    y = torch.rand(8, 4)
    steps = []
    for event in (0, 1):
        torch.manual_seed(1)
        model = nn.Linear(5, 4)
        likelihood = pb.likelihoods.Bernoulli(event=event)
        opt = kfac(model, lr=1.0, likelihood=likelihood, fisher="exact", damping=0.0, momentum=0.0)
        loss = F.binary_cross_entropy_with_logits(model(x), y, reduction="sum")
        (loss / (len(x) if event else y.numel())).backward()
        opt.step()
        steps.append(vector(model))
    assert torch.allclose(*steps, rtol=1e-10)
    with pytest.raises(pb.PullbackError, match="event"):
        pb.likelihoods.Bernoulli(event=-1)
