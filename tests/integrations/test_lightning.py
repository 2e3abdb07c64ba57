"""Lightning's trainer takes the steps of a loop by hand."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pullback as pb
from tests.kfac_options import kfac_of

from ..optim.common import DOUBLE, closure_of, data, mlp
from .common import NATURAL, classifier, lightning_fit, points, vector


@pytest.fixture(autouse=True)
def lightning() -> Any:
    """Return the package, which takes seconds to import: not before a test needs it."""
    return pytest.importorskip("lightning")


@pytest.mark.parametrize(
    "step",
    [pb.steps.Constant(0.5), pb.steps.Backtracking(), pb.steps.LevenbergMarquardt()],
    ids=lambda s: type(s).__name__,
)
def test_an_exact_fit_is_the_loop_by_hand(step: pb.steps.Step, lightning: Any) -> None:
    x, y = data(24)
    torch.manual_seed(1)
    net = mlp()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return F.mse_loss(self(batch[0]), batch[1])

        def configure_optimizers(self) -> pb.NaturalGradient:
            return pb.NaturalGradient(self, step=step)

    module = Module().to(DOUBLE)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    opt = pb.NaturalGradient(net, step=step)
    for _ in range(2):
        for a, b in zip(x.split(8), y.split(8), strict=True):
            opt.step(closure_of(opt, net, a, b))
    assert torch.equal(vector(module.net), vector(net))


def by_hand(clip: float | None, micro: int = 1) -> Tensor:
    net = classifier({}).net
    opt = kfac_of(net, **NATURAL)
    x, y = points().tensors
    for epoch in range(2):
        for a, b in zip(x.split(16 * micro), y.split(16 * micro), strict=True):
            opt.param_groups[0]["lr"] = 0.1 * 0.5**epoch
            opt.zero_grad()
            F.cross_entropy(net(a), b).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            opt.step()
    return vector(net)


@pytest.mark.parametrize(
    ("manual", "micro", "options"),
    [
        (False, 1, {}),
        (False, 2, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        (True, 1, {}),
    ],
    ids=["automatic", "accumulated and clipped", "manual"],
)
@pytest.mark.filterwarnings("ignore")
def test_a_fit_is_the_loop_by_hand(manual: bool, micro: int, options: dict[str, Any]) -> None:
    """A scheduler steps after every epoch, unless optimization is manual."""
    module = classifier(NATURAL, manual)
    lightning_fit(module, **options, **({"max_epochs": 1} if manual else {}))
    if manual:
        other = classifier(NATURAL)
        lightning_fit(other, max_epochs=1, gradient_clip_val=0.5)
        assert torch.equal(vector(module.net), vector(other.net))
        return
    want = by_hand(options.get("gradient_clip_val"), micro)
    torch.testing.assert_close(vector(module.net), want, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_fit_has_the_same_bits(tmp_path: Path) -> None:
    whole, first, repeated = (classifier({**NATURAL, "fisher": "mc"}) for _ in range(3))
    lightning_fit(whole)
    lightning_fit(first, max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    lightning_fit(repeated, path=tmp_path / "one.ckpt")
    assert torch.equal(vector(repeated.net), vector(whole.net))
