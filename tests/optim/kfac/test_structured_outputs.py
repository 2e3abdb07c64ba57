"""Tuples, dicts and dataclasses as outputs: default rules need no name of a tensor."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from ..common import refused


@dataclass
class Scores:
    loss: Tensor
    scores: Tensor


class Classifier(nn.Module):
    """Returns what it computes in one of several shapes; the loss may be made inside."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.head = nn.Linear(16, 3)
        self.shape = shape

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(torch.tanh(self.body(x)))
        loss = F.cross_entropy(logits, y)
        match self.shape:
            case "plain":
                return logits
            case "logits first":
                return logits, loss
            case "loss first":
                return loss, logits
            case "dict":
                return {"loss": loss, "scores": logits}
            case "nested":
                return {"loss": loss, "extra": [(y, logits)]}
            case _:
                return Scores(loss, logits)


class VariationalAutoencoder(nn.Module):
    """Reconstruction, mean and log-variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 16)
        self.mean = nn.Linear(16, 2)
        self.log_variance = nn.Linear(16, 2)
        self.decoder = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.encoder(x))
        mean = self.mean(hidden)
        log_variance = self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def _loss_of(output: Any, y: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return F.cross_entropy(output, y)
    if isinstance(output, tuple):
        return next(tensor for tensor in output if tensor.ndim == 0)
    if isinstance(output, dict):
        return output["loss"]
    return output.loss


def _train(shape: str, rule: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = Classifier(shape).double()
    x = torch.randn(40, 6, dtype=torch.float64)
    y = torch.randint(0, 3, (40,))
    opt = pb.KFAC(model, rule=rule, statistics_every=2, invert_every=2)
    for _ in range(5):
        opt.zero_grad()
        _loss_of(model(x, y), y).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("rule", ["eigenbasis", "spectral"])
@pytest.mark.parametrize("shape", ["logits first", "loss first", "dict", "nested", "dataclass"])
def test_packing_does_not_change_the_steps(shape: str, rule: str) -> None:
    plain = _train("plain", rule)
    for packed, expected in zip(_train(shape, rule), plain, strict=True):
        torch.testing.assert_close(packed, expected, rtol=1e-12, atol=1e-12)


def test_a_variational_autoencoder_trains_without_output() -> None:
    torch.manual_seed(0)
    model = VariationalAutoencoder()
    x = torch.randn(64, 2) @ torch.randn(2, 6)
    opt = pb.KFAC(model, lr=0.03)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(60):
            opt.zero_grad()
            reconstruction, mean, log_variance = model(x)
            divergence = 0.5 * (mean.square() + log_variance.exp() - log_variance - 1).sum(1).mean()
            loss = (reconstruction - x).square().sum(1).mean() + 0.01 * divergence
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 3
    assert {row.rule for row in opt.coverage() if row.name.endswith("weight")} == {"eigenbasis"}


def test_a_metric_still_asks_which_tensor() -> None:
    model = Classifier("logits first")
    opt = pb.KFAC(model, likelihood=nn.CrossEntropyLoss())
    with refused("output is not one tensor", "got tuple", "output=..."):
        model(torch.randn(8, 6), torch.randint(0, 3, (8,)))
    opt.close()
