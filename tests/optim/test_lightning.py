"""In Lightning's own trainer, where it is installed; `test_citizen` has its closure without it."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pullback as pb

from .common import DOUBLE, closure_of, data, mlp, vector

lightning = pytest.importorskip("pytorch_lightning")


@pytest.mark.parametrize(
    "step",
    [pb.steps.Constant(0.5), pb.steps.Backtracking(), pb.steps.LevenbergMarquardt()],
    ids=lambda s: type(s).__name__,
)
def test_a_fit_is_the_hand_written_loop(step: pb.steps.Step) -> None:
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
