"""SOAP beside its equations in NumPy's float64, and Muon beside torch's."""

import numpy as np
import pytest
import torch
from torch import nn

from pullback_experiments.races.optimizers import SOAP, Muon, NorMuon, polar


def _gradients(shape: tuple[int, ...], count: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -1, shape[0]).view(-1, *(1 for _ in shape[1:]))
    return [scales * torch.randn(shape, generator=draw).double() for _ in range(count)]


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (6, 2, 2)])
def test_soap_is_its_equations(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # to compare closely
    beta1 = 0.9
    beta2 = 0.8
    eps = 1e-8
    lr = 0.1
    decay = 0.05
    interval = 3
    weight = nn.Parameter(torch.ones(shape, dtype=torch.float64))
    soap = SOAP(
        [weight], lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, refresh_every=interval
    )
    first, *others = _gradients(shape, 8)
    weight.grad = first
    soap.step()
    g = first.flatten(1).numpy()
    w = np.full(g.shape, 1.0) * (1 - lr * decay)
    left = g @ g.T
    right = g.T @ g
    q, p = (soap.state[weight][k][0].numpy().copy() for k in "qp")
    for base, factor in ((q, left), (p, right)):
        np.testing.assert_allclose(base.T @ base, np.eye(len(base)), atol=1e-12)
        rotated = base.T @ factor @ base
        np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-10)
    m = np.zeros_like(g)
    v = np.zeros_like(g)
    for t, grad in enumerate(others, 1):
        weight.grad = grad
        soap.step()
        g = grad.flatten(1).numpy()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (q.T @ g @ p) ** 2
        inner = (q.T @ m @ p) / (1 - beta1**t) / (np.sqrt(v / (1 - beta2**t)) + eps)
        w = (1 - lr * decay) * w - lr * q @ inner @ p.T
        np.testing.assert_allclose(weight.detach().flatten(1).numpy(), w, atol=1e-9)
        left = beta2 * left + (1 - beta2) * g @ g.T
        right = beta2 * right + (1 - beta2) * g.T @ g
        if t % interval == 0:
            rows = np.argsort(-np.diag(q.T @ left @ q))
            columns = np.argsort(-np.diag(p.T @ right @ p))
            q, p = (np.linalg.qr(s @ b)[0] for s, b in ((left, q[:, rows]), (right, p[:, columns])))
            v = v[rows][:, columns]


@pytest.mark.parametrize("as_long_as_muon", [False, True])
def test_normuon_is_its_equations(as_long_as_muon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    weight = nn.Parameter(torch.ones(3, 5, dtype=torch.float64))
    normuon = NorMuon(
        [weight], 0.1, momentum=0.9, beta2=0.8, weight_decay=0.05, as_long_as_muon=as_long_as_muon
    )
    w = np.ones((3, 5))
    m = np.zeros((3, 5))
    v = np.zeros((3, 1))
    for gradient in _gradients((3, 5), 4):
        weight.grad = gradient
        normuon.step()
        g = gradient.numpy()
        m = 0.9 * m + 0.1 * g
        o = polar(torch.from_numpy(0.1 * g + 0.9 * m)[None])[0].numpy()
        v = 0.8 * v + 0.2 * (o**2).mean(1, keepdims=True)
        x = o / np.sqrt(v)
        length = 0.2 * np.sqrt(15)
        if as_long_as_muon:
            length = 0.2 * np.sqrt(5) * np.linalg.norm(o)
        w = (1 - 0.1 * 0.05) * w - 0.1 * length * x / np.linalg.norm(x)
        np.testing.assert_allclose(weight.detach().numpy(), w, atol=1e-7)


def test_stacks_are_matrices_one_by_one() -> None:
    shapes = [(4, 3), (4, 3), (3, 4), (4, 3)]
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(s, generator=draw) for s in shapes]
    grads = [[torch.randn(s, generator=draw) for s in shapes] for _ in range(4)]
    for make_optimizer in (Muon, NorMuon, lambda params, lr: SOAP(params, lr, refresh_every=2)):
        stacked, one_by_one = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
        one = make_optimizer(stacked, 0.1)
        several = [make_optimizer([p], 0.1) for p in one_by_one]
        for gradients in grads:
            for p, q, g in zip(stacked, one_by_one, gradients, strict=True):
                p.grad = g
                q.grad = g
            for optimizer in (one, *several):
                optimizer.step()
        torch.testing.assert_close(list(stacked), list(one_by_one), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("make_optimizer", "tolerance"), [(Muon, 0.04), (NorMuon, 1e-5)])
def test_filters_move_as_matrices_do(
    make_optimizer: type[Muon | NorMuon], tolerance: float, layout: torch.memory_format
) -> None:
    """A filter is a row, and entries of a step have a root mean square of 0.2 in every shape."""
    draw = torch.Generator().manual_seed(3)
    for shape in ((6, 4, 3, 3), (40, 4, 1, 1)):
        gradient = torch.randn(shape, generator=draw)
        filters = nn.Parameter(torch.zeros(shape).to(memory_format=layout))
        matrix = nn.Parameter(torch.zeros(shape).flatten(1))
        filters.grad = gradient.to(memory_format=layout)
        matrix.grad = gradient.flatten(1)
        for weight in (filters, matrix):
            make_optimizer([weight], 0.1).step()
        torch.testing.assert_close(filters.detach().flatten(1), matrix.detach(), atol=1e-6, rtol=0)
        assert abs(filters.detach().square().mean().sqrt() / 0.1 - 0.2) < tolerance


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_muon_takes_the_steps_of_torchs() -> None:
    draw = torch.Generator().manual_seed(2)
    start = torch.randn(8, 5, generator=draw)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    torchs = torch.optim.Muon([theirs], 0.01, adjust_lr_fn="match_rms_adamw")
    for optimizer in (Muon([ours], 0.01), torchs):
        draw.manual_seed(3)
        for _ in range(4):
            for p in (ours, theirs):
                if p is ours:
                    p.grad = torch.randn(8, 5, generator=draw)
                else:
                    p.grad = ours.grad
            optimizer.step()
    # torch's iterates are bfloat16
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_polar_factors() -> None:
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(4))
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    values = (u.mT @ polar(x) @ v.mT).diagonal(dim1=-2, dim2=-1)
    assert bool(((values > 0.6) & (values < 1.3)).all())
