"""Models of other packages: their logits are found, and their weights by what they do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import pullback as pb
from tests.kfac_options import kfac_of

from .common import WORDS, LazyPackage, batches, gpt2, needs, vector

pytestmark = needs("transformers")
hf: Any = LazyPackage("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, num_key_value_heads=1))


def lora() -> nn.Module:
    peft: Any = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=3))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    options = {"vocab_size": WORDS, "decoder_start_token_id": 0, "use_cache": False}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, **options))


def vit() -> nn.Module:
    options = {n: v for n, v in SMALL.items() if n not in ("vocab_size", "bos_token_id")}
    return hf.ViTForImageClassification(
        hf.ViTConfig(**options, image_size=16, patch_size=8, num_labels=3)
    )


def shufflenet() -> nn.Module:
    models: Any = pytest.importorskip("torchvision.models")
    return models.shufflenet_v2_x0_5(num_classes=3)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT-2": (lambda: gpt2(dtype=torch.float32), "words"),
    "Llama": (llama, "words"),
    "LoRA": (lora, "words"),
    "T5": (t5, "words"),
    "BERT": (bert, "sentences"),
    "ViT": (vit, "images"),
}


def inputs(family: str) -> dict[str, Any]:
    x, y = batches(16)
    if family == "images":
        return {"pixel_values": torch.randn(16, 3, 16, 16), "labels": x[:, 0] % 3}
    if family == "sentences":
        return {"input_ids": x, "labels": (x[:, 1] - x[:, 0]) % 3}
    return {"input_ids": x, "labels": x.masked_fill(y % 7 == 0, -100)}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *((name, False) for name in MODELS),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("GPT-2", "LoRA")),
    ],
)
def test_logits_are_found(name: str, compiled: bool) -> None:
    """With the loss inside of the model; at least nine tenths of the weights have their block."""
    torch.manual_seed(0)
    make, inputs_kind = MODELS[name]
    model = make().train()
    batch = inputs(inputs_kind)
    losses = []
    net: Any = torch.compile(model, backend="eager") if compiled else model
    opt = kfac_of(net, 0.05, likelihood=pb.likelihoods.Categorical(), statistics_every=2)
    for _ in range(6):
        opt.zero_grad()
        loss = net(**batch).loss
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    trained = [row for row in opt.coverage() if row.block != "none"]
    sizes = {row.name: torch.Size(row.shape).numel() for row in trained}
    total = sum(sizes[row.name] for row in trained if "kronecker" in row.block)
    assert total > 0.9 * sum(sizes.values())


def test_a_distributed_checkpoint_is_loaded_after_a_step(tmp_path: Any) -> None:
    """Blocks that functions show are not known before, so that a fresh state has other names."""

    def step(model: Any, opt: pb.KFAC, number: int) -> None:
        opt.zero_grad()
        x = (batches(16)[0] + number) % WORDS
        model(input_ids=x, labels=x).loss.backward()
        opt.step()

    def built() -> tuple[Any, pb.KFAC]:
        model = gpt2().train()
        return model, pb.KFAC(model, statistics_every=2, invert_every=4)

    model, opt = built()
    for number in range(5):
        step(model, opt, number)
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    other, fresh = built()
    step(other, fresh, 0)
    weights, state = get_state_dict(other, fresh)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(other, fresh, model_state_dict=weights, optim_state_dict=state)
    for number in range(5, 9):
        step(model, opt, number)
        step(other, fresh, number)
    assert torch.equal(vector(other), vector(model))


def test_a_net_of_torchvision() -> None:
    torch.manual_seed(0)
    model = shufflenet().train()
    opt = pb.KFAC(model, statistics_every=2)
    x = torch.randn(8, 3, 32, 32)
    y = torch.arange(8) % 3
    losses = []
    for _ in range(4):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_gpt2_has_the_symmetries_of_its_twin_of_linear_layers() -> None:
    model = gpt2()
    twin = copy.deepcopy(model)
    for block in twin.transformer.h:
        for module, name in [(block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"),
                           (block.mlp, "c_proj")]:  # fmt: skip
            old = getattr(module, name)
            new = nn.Linear(*old.weight.shape, dtype=old.weight.dtype)
            new.weight.data = old.weight.data.T.clone()
            new.bias.data = old.bias.data.clone()
            setattr(module, name, new)
    x = {"input_ids": torch.arange(16).view(2, 8) % WORDS}
    counts = [pb.symmetry.find(m.eval(), x, output="logits").generators() for m in (model, twin)]
    assert len(counts[0]) == len(counts[1]) > 200
