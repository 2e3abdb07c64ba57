"""K-FAC on LoRA's matrices of a Llama, small, in a loop with Accelerate.

    python examples/kfac_lora.py
    torchrun --nproc-per-node 2 examples/kfac_lora.py

The optimizer is built on the model that Accelerate has wrapped. Random weights take the place of
pretrained ones, so that nothing is downloaded. Needs `pip install transformers peft`.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import pullback as pb


def main(steps: int = 60) -> tuple[float, float]:
    """Train on counting modulo 11, and return the first and the last loss."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=16, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    lora = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"])
    rows = [(i + (1 + i % 3) * torch.arange(12)) % 11 for i in range(990)]
    model, loader = accelerator.prepare(
        get_peft_model(LlamaForCausalLM(config), lora), DataLoader(rows, 32, shuffle=True)
    )
    opt = accelerator.prepare(pb.KFAC(model, lr=1e-2))
    losses: list[float] = []
    while len(losses) < steps:
        for tokens in loader:
            opt.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            opt.step()
            losses.append(loss.item())
    accelerator.print(f"{accelerator.num_processes} processes", end=": ")
    accelerator.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
