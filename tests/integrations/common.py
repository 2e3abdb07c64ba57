"""Small models, data, and loops of Hugging Face and Lightning, for one process or several."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import pullback as pb
from tests.kfac_options import kfac_of

WORDS = 9
LENGTH = 8
IGNORED = -100
NATURAL: dict[str, Any] = {
    "likelihood": pb.likelihoods.Categorical(), "fisher": "exact", "statistics_every": 2,
    "invert_every": 4,
}  # fmt: skip
SPECTRAL: dict[str, Any] = {"statistics_every": 2, "invert_every": 4}


class LazyPackage:
    """A package that takes seconds to import: not before a test needs it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self.name), attribute)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests unless these packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{missing} are not installed")


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


# --- Hugging Face -------------------------------------------------------------------------------


def next_word_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """`ForCausalLMLoss` in the model's own precision; that one is in float32."""
    z = logits[:, :-1].flatten(0, 1)
    y = labels[:, 1:].flatten()
    total = F.cross_entropy(z, y, reduction="sum", ignore_index=IGNORED)
    return total / ((y != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)


def gpt2(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    rates = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
    model: Any = hf.GPT2LMHeadModel(hf.GPT2Config(
        vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH, bos_token_id=1,
        eos_token_id=2, use_cache=False, **rates,
    ))  # fmt: skip
    model = model.to(dtype)
    if dtype is torch.float64:
        model.loss_function = next_word_loss
    return model


def sentences(count: int = 64) -> list[dict[str, Tensor]]:
    """Counting in steps of 1 to 3, with prompts and ends of several lengths that are ignored.

    Positions are given: where a table serves all samples at once, K-FAC's block is an estimate.
    """
    out = []
    for i in range(count):
        x = (7 * i + (1 + i % 3) * torch.arange(LENGTH)) % WORDS
        y = x.clone()
        y[: i % 4] = y[LENGTH - i % 3 :] = IGNORED
        out.append({"input_ids": x, "labels": y, "position_ids": torch.arange(LENGTH)})
    return out


def arguments(folder: Any, **options: Any) -> Any:
    import transformers as hf

    hf.logging.set_verbosity_error()
    return hf.TrainingArguments(**{
        "output_dir": str(folder), "per_device_train_batch_size": 8, "max_steps": 6,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "lr_scheduler_type": "linear", "dataloader_pin_memory": False, "max_grad_norm": 0.5,
        "logging_strategy": "no", **options,
    })  # fmt: skip


def fit(model: Any, folder: Any, kfac: dict[str, Any], resume: Any = None, **options: Any) -> Any:
    """Train by Hugging Face's Trainer; return it, with the batches that it took."""
    import transformers as hf

    class RecordingTrainer(hf.Trainer):
        def training_step(self, model: Any, inputs: Any, count: Any = None) -> Any:  # pyright: ignore
            self.trained_batches.append((dict(inputs), count))
            return super().training_step(model, inputs, count)

    args = arguments(folder, **options)
    opt = kfac_of(model, group=dist.group.WORLD, **kfac)
    trainer: Any = RecordingTrainer(model, args, train_dataset=sentences(), optimizers=(opt, None))
    trainer.trained_batches = []
    trainer.kfac = opt
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train_accelerated(
    rank: int,
    size: int,
    kfac: dict[str, Any],
    after: bool = False,
    micro: int = 2,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Tensor:
    """Train by Accelerate's `accumulate`; the optimizer is built before wrapping, or after."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro, **options)
    model = gpt2(dtype=dtype)
    x, y = batches(64)
    words = TensorDataset(x, y)
    loader: Any = DataLoader(words, batch_size=16 // size // micro)
    if after:
        model, loader = accelerator.prepare(model, loader)
        opt: Any = accelerator.prepare(kfac_of(model, **kfac))
    else:
        model, opt, loader = accelerator.prepare(
            model, kfac_of(model, group=dist.group.WORLD, **kfac), loader
        )
    for x, y in loader:
        with accelerator.accumulate(model):
            expand = torch.arange(LENGTH).expand(len(x), LENGTH)
            z = model(input_ids=x, position_ids=expand).logits
            accelerator.backward(F.cross_entropy(z.flatten(0, 1), y.flatten()))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
    return vector(accelerator.unwrap_model(model))


def batches(count: int) -> tuple[Tensor, Tensor]:
    """Words and the next ones."""
    x = torch.stack([row["input_ids"] for row in sentences(count)])
    return x, (x + x[:, 1:2] - x[:, :1]) % WORDS


# --- Lightning ----------------------------------------------------------------------------------


class Share(Sampler[int]):
    """Every `size`-th sample, in order; Lightning's own sampler shuffles."""

    def __init__(self, rank: int, size: int, count: int) -> None:
        self.indices = range(rank, count, size)

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def classifier(kfac: dict[str, Any], manual: bool = False, inner: bool = True) -> Any:
    """A module of Lightning around a small network."""
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            layers = nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)
            self.net = nn.Sequential(*layers).double()
            self.automatic_optimization = not manual

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self.net(x) if inner else self(x), y)
            if not manual:
                return loss
            opt: Any = self.optimizers()
            opt.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(opt, gradient_clip_val=0.5)
            return opt.step()

        def configure_optimizers(self) -> Any:
            opt = kfac_of(self.net if inner else self, group=dist.group.WORLD, **kfac)
            schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
            return {"optimizer": opt, "lr_scheduler": schedule}

    return Classifier()


def points(count: int = 64) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=random, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=random))


def lightning_fit(
    module: Any, rank: int = 0, size: int = 1, path: Any = None, **options: Any
) -> Any:
    """Train two epochs of four batches; return the trainer."""
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(**{
        "max_epochs": 2, "accelerator": "cpu", "devices": size, "logger": False,
        "strategy": "ddp" if size > 1 else "auto", "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
        "use_distributed_sampler": False, **options,
    })  # fmt: skip
    data = points()
    loader = DataLoader(data, batch_size=16 // size, sampler=Share(rank, size, len(data)))
    trainer.fit(module, loader, ckpt_path=path)
    return trainer
