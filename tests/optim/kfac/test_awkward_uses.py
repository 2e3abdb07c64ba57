"""Weights that are used in several ways, hooks, and inputs without dense axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pullback as pb

RULES: list[dict[str, Any]] = [
    {},
    {"likelihood": pb.likelihoods.Categorical()},
    {"rule": "spectral"},
    {"rule": "two-sided"},
    {"rule": "eigenbasis"},
]


class Twice(nn.Module):
    """A layer, and a function that uses the layer's weight again."""

    def __init__(self, use_again: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head, self.use_again = nn.Linear(4, 4), nn.Linear(4, 3), use_again

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.use_again(self.layer(x).relu(), self.layer.weight))


def train(model: nn.Module, x: Tensor, **options: Any) -> pb.KFAC:
    optimizer = pb.KFAC(model, lr=0.01, **options)
    y = torch.arange(len(x)) % 3
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


AGAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": lambda h, w: h @ w,
    "linear": lambda h, w: F.linear(h, w),
    "linear twice": lambda h, w: F.linear(F.linear(h, w).tanh(), w),
    "linear, transposed": lambda h, w: F.linear(h, w.T),
}


@pytest.mark.parametrize("options", RULES, ids=str)
@pytest.mark.parametrize("second_use", AGAIN)
def test_a_layers_weight_is_used_again(second_use: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    optimizer = train(Twice(AGAIN[second_use]), torch.randn(8, 4), **options)
    blocks = {row.name: row.block for row in optimizer.coverage()}
    assert blocks["layer.weight"].startswith("kronecker")


@pytest.mark.parametrize("options", RULES, ids=str)
def test_nested_inputs_are_refused(options: dict[str, Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x).to_padded_tensor(0.0).sum(1))

    rows = [torch.randn(2, 4), torch.randn(3, 4)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(pb.PullbackError, match="nested tensor"):
        train(Net(), nested, **options)


def test_a_gradient_hook_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    optimizer = train(model, torch.randn(8, 4), likelihood=pb.likelihoods.Categorical())
    reasons = {row.name: row.reason for row in optimizer.coverage()}
    assert "gradient hook" in reasons["0.weight"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", RULES, ids=str)
def test_an_expert_without_rows_is_named(options: dict[str, Any]) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.experts[0](x)))

    optimizer = train(Routed(), torch.randn(8, 4), **options)
    reasons = {row.name: row.reason for row in optimizer.coverage()}
    assert "no layer with known structure" not in reasons["experts.1.weight"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", RULES, ids=str)
def test_an_idle_expert_does_not_void_the_statistics_of_others(options: dict[str, Any]) -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            busy, idle = self.experts
            return self.head(torch.cat([busy(x), idle(x[:0])]).tanh())

    optimizer = train(Routed(), torch.randn(8, 4), statistics_every=1, **options)
    rows = {row.name: row for row in optimizer.coverage()}
    assert rows["experts.0.weight"].rule not in {"adam", "none"}
    assert "no block" not in rows["experts.1.weight"].reason
    assert rows["experts.1.weight"].reason != "weight of Linear"
    assert optimizer.info.took_statistics


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"likelihood": pb.likelihoods.Categorical()}], ids=str)
def test_empty_batches_of_products_are_refused_or_skipped(options: dict[str, Any]) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    with pytest.raises(pb.PullbackError, match="The batch is empty"):
        train(Product(), torch.randn(0, 4), **options)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("has_offsets", [False, True])
def test_embedding_bags(mode: str, has_offsets: bool) -> None:
    """The block's formula gives autograd's gradient, which the proof compares."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.EmbeddingBag(10, 4, mode=mode), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if has_offsets:  # bags of 5, 2, 3, 5, ... indices, one of them empty
                offsets = torch.tensor([0, 5, 7, 10, 15, 20, 20, 30])
                return self.head(self.table(x.flatten(), offsets))
            return self.head(self.table(x))

    torch.manual_seed(0)
    x = torch.randint(0, 10, (8, 5))
    optimizer = train(Bags(), x, likelihood=pb.likelihoods.Categorical())
    blocks = {row.name: row.block for row in optimizer.coverage()}
    assert blocks["table.weight"].startswith("kronecker")
    assert pb.parameter_roles(Bags(), x)[0].role == "embedding"


def test_bilinear_layers() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 5), nn.Bilinear(5, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(x).tanh(), x)

    optimizer = train(Pairs(), torch.randn(8, 4), likelihood=pb.likelihoods.Categorical())
    assert all(row.block.startswith("kronecker") for row in optimizer.coverage())


@pytest.mark.parametrize("gram", ["rows", "kernel"])
def test_position_embeddings_under_a_trust_norm(gram: str) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position_embedding = nn.Parameter(torch.randn(1, 5, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((x + self.position_embedding).tanh()).mean(1)

    torch.manual_seed(0)
    model = Positions().double()
    x, y = torch.randn(6, 5, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    optimizer = pb.NaturalGradient(
        model, metric=pb.metrics.Euclidean(), solver=pb.solvers.Cholesky(damping=1e-3),
        step=pb.steps.TrustNorm(0.1), gram=gram,
    )  # fmt: skip
    before = model.position_embedding.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not torch.equal(before, model.position_embedding)
