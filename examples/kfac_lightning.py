"""K-FAC under Lightning: `configure_optimizers` returns it, and nothing else changes.

Lightning runs forward, backward and step in a closure of its own; K-FAC sees them by its hooks.
Needs `pip install lightning`.
"""

import logging
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pullback as pb


class Classifier(L.LightningModule):
    """Two blobs per class, told apart by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        opt = pb.KFAC(self.net, lr=0.1, likelihood=pb.likelihoods.Categorical(), damping=1e-2)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)]


def main(epochs: int = 10) -> float:
    """Train, and return the accuracy."""
    L.seed_everything(0)
    centers = 3 * torch.randn(6, 2)
    which = torch.arange(600) % 6
    x, y = centers[which] + 0.3 * torch.randn(600, 2), which % 3
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=60, shuffle=True))
    accuracy = (model.net(x).argmax(1) == y).float().mean().item()
    print(f"last loss {trainer.callback_metrics['loss']:.4f}, accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
