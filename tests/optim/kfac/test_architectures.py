"""Random small networks: every parameter has a block, the blocks are right, the step is finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pullback.testing import assert_close
from tests.optim.common import vector
from tests.optim.kfac import oracle as o


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Again(nn.Module):
    """One module, called several times."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.inner(x))
        return x


class Tied(nn.Module):
    """Two linear layers with one weight, one of them without a bias."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(n, n), nn.Linear(n, n, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class Gain(nn.Module):
    """A plain parameter."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(n))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Attention(nn.Module):
    """Written by hand; of one place where x has no axis of places."""

    def __init__(self, n: int, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(n, n, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 2:
            return self.v(x) * torch.sigmoid(self.q(x) * self.k(x))
        return torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x)


class Fused(nn.Module):
    """torch's own attention or recurrence, on sequences."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        sequence = x if x.ndim == 3 else x[:, None]
        if isinstance(self.inner, nn.MultiheadAttention):
            y = self.inner(sequence, sequence, sequence, need_weights=False)[0]
        else:
            y = self.inner(sequence)[0]
        return y if x.ndim == 3 else y[:, 0]


class Plain(nn.Module):
    """Contiguous cotangents: with other strides torch's batch norm may return wrong gradients."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(Tensor.contiguous)
        return y


class Pool(nn.Module):
    """(N, C, *space) -> (N, C), or (N, places, C)."""

    def __init__(self, mean: bool) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).mT
        return x.mean(1) if self.mean else x


class Output(nn.Module):
    """An output layer that shares the embedding's table."""

    def __init__(self, table: nn.Embedding, bias: bool) -> None:
        super().__init__()
        self.out = nn.Linear(table.embedding_dim, table.num_embeddings, bias=bias)
        self.out.weight = table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


ACTIVATIONS = [nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity]


@st.composite
def features(draw: Any, n: int, depth: int = 0) -> tuple[nn.Module, int]:
    """A layer on the last axis, and the width after it."""
    bias, wide = draw(st.booleans()), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(_FEATURES if depth == 0 else _FEATURES[:7]))
    if kind == "linear":
        return nn.Linear(n, wide, bias=bias), wide
    if kind == "activation":
        return draw(st.sampled_from(ACTIVATIONS))(), n
    if kind == "norm":
        return nn.LayerNorm(n, eps=1e-3, bias=bias), n
    if kind == "rms":
        return nn.RMSNorm(n, eps=1e-3), n
    if kind == "tied":
        return Tied(n), n
    if kind == "attention":
        return Attention(n, bias), n
    if kind == "again":
        return Again(nn.Linear(n, n, bias=bias), draw(st.integers(2, 3))), n
    if kind == "residual":
        inner, out = draw(features(n, 1))
        return Residual(inner) if out == n else Residual(inner, nn.Linear(out, n)), n
    if kind == "gain":
        return Gain(n), n
    if kind == "slope":
        return nn.PReLU(), n
    if kind == "fused attention":
        return Fused(nn.MultiheadAttention(n, 1, bias=bias, batch_first=True)), n
    return Fused(nn.GRU(n, wide, bias=bias, batch_first=True)), wide


_FEATURES = [
    "linear", "norm", "activation", "tied", "attention", "again", "rms",
    "residual", "gain", "slope", "fused attention", "recurrence",
]  # fmt: skip


@st.composite
def spatial(draw: Any, n: int, dims: int) -> tuple[nn.Module, int]:
    """A layer on images with n channels, and the channels after it."""
    kind = draw(st.sampled_from(["conv", "conv", "transposed", "norm", "slope", "activation"]))
    if kind == "activation":
        return draw(st.sampled_from(ACTIVATIONS))(), n
    if kind == "slope":
        return nn.PReLU(draw(st.sampled_from([1, n]))), n
    if kind == "norm":
        which = draw(st.sampled_from(["group", "instance", "batch"]))
        if which == "group":
            return nn.GroupNorm(draw(st.sampled_from([1, n])), n), n
        family = {
            "instance": [nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d],
            "batch": [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d],
        }[which]
        norm = family[dims - 1](n, affine=True)
        return Plain(norm if which == "instance" else norm.eval()), n
    groups = draw(st.sampled_from([g for g in (1, 2, 3) if n % g == 0]))
    out = groups * draw(st.integers(1, 2))
    sizes = {
        name: tuple(draw(st.integers(low, high)) for _ in range(dims))
        for name, low, high in (("kernel_size", 1, 3), ("stride", 1, 2), ("dilation", 1, 2))
    }
    bias = draw(st.booleans())
    if kind == "transposed":
        family = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d]
        sizes["kernel_size"] = tuple(min(k, 2) for k in sizes["kernel_size"])
        sizes["dilation"] = (1,) * dims
        return family[dims - 1](n, out, groups=groups, bias=bias, **sizes), out
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    reach = [d * (k - 1) for k, d in zip(sizes["kernel_size"], sizes["dilation"], strict=True)]
    pad = tuple((r + 1) // 2 for r in reach)  # the image never vanishes
    same = draw(st.booleans()) and set(sizes["stride"]) == {1}
    family = [nn.Conv1d, nn.Conv2d, nn.Conv3d]
    conv = family[dims - 1](
        n,
        out,
        groups=groups,
        bias=bias,
        padding="same" if same else pad,
        padding_mode=mode,
        **sizes,
    )
    return conv, out


@st.composite
def networks(draw: Any) -> tuple[nn.Module, Tensor, str]:
    """A network, a batch for it, and the kind of its loss."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    samples, layers = draw(st.integers(1, 3)), []
    kind = draw(st.sampled_from(["gaussian", "categorical", "euclidean"]))
    family = draw(st.sampled_from(["vectors", "sequences", "words", "images"]))
    table = None
    if family == "words":
        n = draw(st.integers(1, 3))
        table = nn.Embedding(4, n, padding_idx=draw(st.sampled_from([None, 1])))
        layers.append(table)
        x = torch.randint(0, 4, (samples, draw(st.integers(1, 3))))
        x[0, 0] = 2  # one word at least is no padding
    elif family == "images":
        dims, n = draw(st.sampled_from([1, 1, 2, 2, 3])), draw(st.integers(1, 3))
        space = [draw(st.integers(3, 4)) if dims < 3 else 3 for _ in range(dims)]
        x = torch.randn(samples, n, *space)
        for _ in range(draw(st.integers(1, 2))):
            layer, n = draw(spatial(n, dims))
            trial = nn.Sequential(*layers, layer)
            with torch.no_grad():
                try:
                    shape = trial(x).shape
                except (RuntimeError, ValueError):  # a padding wider than the image
                    continue
            if math.prod(shape[2:]) > 40 or math.prod(shape[2:]) < 2:
                continue
            layers.append(layer)
        n = nn.Sequential(*layers)(x).shape[1]
        mean = draw(st.booleans()) or math.prod(nn.Sequential(*layers)(x).shape[2:]) > 9
        layers.append(Pool(mean))
    else:
        n = draw(st.integers(1, 4))
        lead = [draw(st.integers(1, 3))] if family == "sequences" else []
        x = torch.randn(samples, *lead, n)
    width = n
    for _ in range(draw(st.integers(0, 3))):
        layer, n = draw(features(n))
        layers.append(layer)
    if table is not None and n == width and draw(st.booleans()):
        layers.append(Output(table, draw(st.booleans())))
    else:
        layers.append(nn.Linear(n, draw(st.integers(2, 3))))
    return nn.Sequential(*layers), x, kind


def compounds(model: nn.Module) -> set[str]:
    """Parameters inside fused layers, and plain ones: the oracle does not know their blocks."""
    return {
        f"{path}.{name}"
        for path, m in model.named_modules()
        if isinstance(m, nn.MultiheadAttention | nn.RNNBase | Gain)
        for name, _ in m.named_parameters()
    }


@given(networks(), st.booleans(), st.booleans(), st.sampled_from(["mean", "sum"]))
@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_random_networks(
    drawn: tuple[nn.Module, Tensor, str], joint: bool, reduce: bool, reduction: str
) -> None:
    torch.set_default_dtype(torch.float64)
    model, x, kind = drawn
    model.double()
    sharing = "reduce" if reduce else "expand"
    want = o.kfac(model, x, kind=kind, joint=joint, reduce=reduce, reduction=reduction)
    exact = o.exact(model, x, kind=kind, reduction=reduction)
    want += o.unit_mask(model, joint) * exact
    opt = o.optimizer(
        model, kind, lr=0.1, joint=joint, sharing=sharing, reduction=reduction, damping=1e-2
    )
    o.loss(model(x), kind, reduction).backward()
    opt.step()
    opt.close()

    # every parameter that the loss feels has a block
    felt = {n: p.grad is not None for n, p in model.named_parameters()}
    for row in opt.coverage():
        assert row.block.startswith(("kronecker", "units", "diagonal")) or not felt[row.name], row
        if row.block == "diagonal":
            assert row.name.endswith("gain")

    # the blocks are those of the definition
    unknown = compounds(model)
    known = torch.cat(
        [torch.full((p.numel(),), n not in unknown) for n, p in model.named_parameters()]
    )
    got = opt.gram().dense()
    assert_close(got[known][:, known], want[known][:, known], 1e-9, "the Gram")
    assert float(torch.linalg.eigvalsh(got)[0]) >= -1e-10 * float(got.norm())
    assert bool(vector(model).isfinite().all())
    assert opt.info.accepted
