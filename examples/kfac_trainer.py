"""K-FAC in Hugging Face's Trainer: GPT-2's architecture, small, from random weights.

    python examples/kfac_trainer.py
    torchrun --nproc-per-node 2 examples/kfac_trainer.py

The arguments come first: they let the processes meet, and `group=` tells K-FAC of them. With one
process the group is None. Needs `pip install transformers accelerate`; nothing is downloaded.
"""

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import pullback as pb


def counting(count: int) -> list[dict[str, Tensor]]:
    """Numbers modulo 11 in steps of 1 to 3; the first two cannot be foretold."""
    rows = [(i + (1 + i % 3) * torch.arange(12)) % 11 for i in range(count)]
    ignored = torch.arange(12) < 2
    return [{"input_ids": row, "labels": row.masked_fill(ignored, -100)} for row in rows]


def main(steps: int = 100) -> tuple[float, float]:
    """Train, and return the first and the last loss."""
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=16, learning_rate=6e-3,
            gradient_accumulation_steps=2, lr_scheduler_type="constant", logging_steps=5,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=11, n_embd=32, n_layer=2, n_head=4, n_positions=12, bos_token_id=0,
            eos_token_id=0,
        ))  # fmt: skip
        opt = pb.KFAC(model, args.learning_rate, group=dist.group.WORLD)
        trainer = Trainer(model, args, train_dataset=counting(990), optimizers=(opt, None))
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    if trainer.is_world_process_zero():
        print(f"{args.world_size} processes: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
