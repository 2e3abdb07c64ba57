"""K-FAC under Lightning: `configure_optimizers` returns it, and nothing else changes.

    python examples/kfac_lightning.py      # one process
    python examples/kfac_lightning.py 2    # two, with strategy="ddp"

Give it the network that `training_step` calls. Lightning wraps the module, so `group=` tells K-FAC
of the processes; with one of them it is None. Needs `pip install lightning`.
"""

import logging
import sys
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
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
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        likelihood = pb.likelihoods.Categorical()
        opt = pb.KFAC(self.net, 0.1, likelihood=likelihood, damping=1e-2, group=dist.group.WORLD)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)]


def main(processes: int = 1, epochs: int = 10) -> float:
    """Train, and return the accuracy."""
    L.seed_everything(0, verbose=False)
    centers = 3 * torch.randn(6, 2)
    which = torch.arange(600) % 6
    x = centers[which] + 0.3 * torch.randn(600, 2)
    y = which % 3
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=processes, gradient_clip_val=1.0,
        strategy="ddp" if processes > 1 else "auto", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Classifier()
    trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=60 // processes, shuffle=True))
    accuracy = (model.net(x).argmax(1) == y).float().mean().item()
    print(f"process {trainer.global_rank}: accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
