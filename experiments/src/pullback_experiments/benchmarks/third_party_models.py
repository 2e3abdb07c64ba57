"""Models that others wrote, from small configurations with random weights, and tasks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

WORDS = 48
CLASSES = 5
Batch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True)
class Model:
    """A model, batches for it, and the likelihood of its output."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    likelihood: Any = None
    output: str | None = None

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        """The mean loss of outputs."""
        if z.shape == y.shape:
            return F.mse_loss(z, y)
        return F.cross_entropy(z.flatten(0, -2), y.flatten())


# --- tasks ------------------------------------------------------------------------------------


def make_counting_batch(random: torch.Generator, n: int = 16, t: int = 12) -> tuple[Tensor, Tensor]:
    """Return numbers in steps of 1 to 3, and the next ones as targets."""
    first = torch.randint(3, WORDS, (n, 1), generator=random)
    stride = torch.randint(1, 4, (n, 1), generator=random)
    words = 3 + (first + stride * torch.arange(t + 1)) % (WORDS - 3)
    return words[:, :-1], words[:, 1:]


def text(**more: Any) -> Callable[[torch.Generator], Batch]:
    def batch(random: torch.Generator) -> Batch:
        x, y = make_counting_batch(random)
        return {"input_ids": x, **more}, y

    return batch


def translation(random: torch.Generator) -> Batch:
    x, y = make_counting_batch(random)
    return {"input_ids": y, "decoder_input_ids": x}, y


def sentences(random: torch.Generator) -> Batch:
    """Return sequences, and in which third of the words each begins."""
    x, _ = make_counting_batch(random)
    return {"input_ids": x, "attention_mask": torch.ones_like(x)}, 3 * (x[:, 0] - 3) // (WORDS - 3)


def pictures(name: str, size: int = 32) -> Callable[[torch.Generator], Batch]:
    """Return noisy waves of several directions."""

    def batch(random: torch.Generator) -> Batch:
        y = torch.randint(0, CLASSES, (16,), generator=random)
        angle = (math.pi * y / CLASSES)[:, None, None]
        times = torch.arange(size) / 4
        wave = torch.sin(times[:, None] * angle.cos() + times * angle.sin())
        noise = torch.randn(16, 3, size, size, generator=random)
        return {name: wave[:, None] + 0.5 * noise}, y

    return batch


def sounds(random: torch.Generator) -> Batch:
    y = torch.randint(0, 2, (8,), generator=random)
    wave = torch.sin(torch.arange(800) * (0.05 + 0.03 * y[:, None]))
    return {"input_values": wave + torch.randn(8, 800, generator=random)}, y


def speech(random: torch.Generator) -> Batch:
    x, y = make_counting_batch(random, 8, 10)
    heard = F.one_hot(y % 16, 16).float().mT.repeat_interleave(4, 2)
    return {"input_features": heard, "decoder_input_ids": x, "use_cache": False}, y


def captions(random: torch.Generator) -> Batch:
    """Return texts and pictures that belong together."""
    images, y = pictures("pixel_values")(random)
    words = torch.full((len(y), 8), 2)
    words[:, 1:7] = 3 + 7 * y[:, None] + torch.randint(0, 7, (len(y), 6), generator=random)
    return {**images, "input_ids": words}, torch.arange(len(y))


def noise(random: torch.Generator) -> Batch:
    images, _ = pictures("sample", 16)(random)
    added = torch.randn(16, 3, 16, 16, generator=random)
    return {"sample": images["sample"] + added, "timestep": 10, "return_dict": False}, added


def nodes(random: torch.Generator) -> Batch:
    """Return two communities in random graphs of 12 nodes."""
    y = torch.randint(0, 2, (8, 12), generator=random)
    chance = torch.where(y[:, None] == y[:, :, None], 0.7, 0.1)
    edges = (torch.rand(8, 12, 12, generator=random) < chance).float()
    x = torch.randn(8, 12, 8, generator=random) + y[..., None]
    return {"x": x, "edges": edges}, y


# --- models -----------------------------------------------------------------------------------


class GraphNetwork(nn.Module):
    """Messages along edges, in plain torch."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [8, width, width]
        self.self_maps = nn.ParameterList(torch.randn(a, b) / a**0.5 for a, b in pairwise(sizes))
        self.near = nn.ParameterList(torch.randn(a, b) / a**0.5 for a, b in pairwise(sizes))
        self.head = nn.Parameter(torch.randn(width, 2) / width**0.5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        for self_map, near in zip(self.self_maps, self.near, strict=True):
            x = torch.relu(x @ self_map + edges @ (x @ near))
        return x @ self.head


class Sequences(nn.Module):
    """`torch.nn.Transformer` between embeddings and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.head = nn.Linear(32, WORDS)
        self.inner = nn.Transformer(32, 4, 1, 1, 64, 0.0, batch_first=True)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        one = self.words(input_ids)
        two = self.words(decoder_input_ids)
        return self.head(self.inner(one, two, tgt_mask=mask, tgt_is_causal=True))


#: sizes of transformers of words, of pictures, and of the convolutions before those of sounds
TEXT_SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IMAGE_SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
SOUND_SIZES: dict[str, Any] = {
    **TEXT_SIZES, "conv_dim": (32, 32, 32), "conv_kernel": (10, 3, 3), "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "layerdrop": 0.0,
    "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.0, "classifier_proj_size": 32,
}  # fmt: skip


def transformers_models() -> dict[str, Model]:
    import transformers as hf

    heads = {**TEXT_SIZES, "num_key_value_heads": 2}
    two: dict[str, Any] = {
        "vocab_size": WORDS, "d_model": 48, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }  # fmt: skip
    plain = text(use_cache=False)

    def gpt2() -> nn.Module:
        sizes = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32}
        return hf.GPT2LMHeadModel(hf.GPT2Config(
            vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **sizes,
        ))  # fmt: skip

    def lora() -> nn.Module:
        import peft

        model = hf.LlamaForCausalLM(hf.LlamaConfig(**heads))
        targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))

    def experts(fused: str) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            config = hf.MixtralConfig(**heads, num_local_experts=4)
            config._experts_implementation = fused
            return hf.MixtralForCausalLM(config)

        return make

    def clip() -> nn.Module:
        words = {**TEXT_SIZES, "max_position_embeddings": 16}
        image_options = {k: v for k, v in IMAGE_SIZES.items() if k != "num_labels"}
        return hf.CLIPModel(
            hf.CLIPConfig(text_config=words, vision_config=image_options, projection_dim=32)
        )

    def wav2vec2() -> nn.Module:
        return hf.Wav2Vec2ForSequenceClassification(hf.Wav2Vec2Config(**SOUND_SIZES))

    def swin() -> nn.Module:
        return hf.SwinForImageClassification(hf.SwinConfig(
            image_size=32, patch_size=2, embed_dim=24, depths=[1, 1], num_heads=[2, 4],
            window_size=4, num_labels=CLASSES,
        ))  # fmt: skip

    def t5() -> nn.Module:
        return hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=WORDS, d_model=48, d_kv=12, d_ff=96, num_layers=1, num_heads=4,
        ))  # fmt: skip

    moe = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "num_experts": 8}
    pixels = pictures("pixel_values")
    return {
        "GPT-2": Model(gpt2, plain),
        "Llama": Model(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**heads)), plain),
        "Llama, LoRA": Model(lora, plain),
        "Gemma": Model(
            lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**heads, head_dim=12)), plain
        ),
        "Mixtral": Model(experts("grouped_mm"), plain),
        "Mixtral, experts in a loop": Model(experts("eager"), plain),
        "Mixtral, experts gathered": Model(experts("batched_mm"), plain),
        "Qwen2-MoE": Model(
            lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**heads, **moe)), plain
        ),
        "Mamba": Model(
            lambda: hf.MambaForCausalLM(hf.MambaConfig(
                vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, state_size=8)), plain
        ),
        "BERT": Model(
            lambda: hf.BertForSequenceClassification(hf.BertConfig(
                **TEXT_SIZES, num_labels=3, max_position_embeddings=32)), sentences
        ),
        "T5": Model(t5, translation),
        "BART": Model(
            lambda: hf.BartForConditionalGeneration(hf.BartConfig(
                **two, max_position_embeddings=32)), translation
        ),
        "Whisper": Model(
            lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(
                **two, num_mel_bins=16, max_source_positions=20, max_target_positions=32)), speech
        ),
        "Wav2Vec2": Model(wav2vec2, sounds),
        "ViT": Model(lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE_SIZES)), pixels),
        "DINOv2": Model(
            lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(
                **{**IMAGE_SIZES, "mlp_ratio": 2})), pixels
        ),
        "Swin": Model(swin, pixels),
        "CLIP": Model(clip, captions, output="logits_per_image"),
    }  # fmt: skip


def torchvision_models() -> dict[str, Model]:
    from torchvision import models as tv

    def resnet() -> nn.Module:
        model: Any = tv.resnet18(num_classes=CLASSES)
        model.layer3 = nn.Identity()
        model.layer4 = nn.Identity()
        model.fc = nn.Linear(128, CLASSES)
        return model

    def convnext() -> nn.Module:
        blocks = [tv.convnext.CNBlockConfig(24, 48, 1), tv.convnext.CNBlockConfig(48, None, 1)]
        return tv.ConvNeXt(blocks, num_classes=CLASSES)

    def efficientnet() -> nn.Module:
        size = {"width_mult": 0.25, "depth_mult": 0.34}
        blocks, last = tv.efficientnet._efficientnet_conf("efficientnet_b0", **size)
        return tv.EfficientNet(blocks, 0.0, num_classes=CLASSES, last_channel=last)

    def swin(**more: Any) -> nn.Module:
        return tv.SwinTransformer([4, 4], 24, [1, 1], [2, 4], [4, 4], num_classes=CLASSES, **more)

    v2 = {"block": tv.swin_transformer.SwinTransformerBlockV2,
          "downsample_layer": tv.swin_transformer.PatchMergingV2}  # fmt: skip
    x = pictures("x")
    models = {
        "ResNet": resnet, "ConvNeXt": convnext, "EfficientNet": efficientnet,
        "MobileNetV3": lambda: tv.mobilenet_v3_small(num_classes=CLASSES, width_mult=0.25),
        "Swin, torchvision": swin, "Swin v2, torchvision": lambda: swin(**v2),
        "ViT, torchvision": lambda: tv.VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=CLASSES),
    }  # fmt: skip
    return {name: Model(make, x) for name, make in models.items()}


def diffusers_models() -> dict[str, Model]:
    from diffusers import UNet2DModel

    def unet() -> nn.Module:
        return UNet2DModel(
            16, 3, 3, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), attention_head_dim=8,
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    return {"U-Net, diffusers": Model(unet, noise, pb.likelihoods.MSE(), output="0")}


def models() -> dict[str, Model]:
    """Every model whose package is installed."""
    models_by_name: dict[str, Model] = {
        "graph network, plain torch": Model(GraphNetwork, nodes),
        "nn.Transformer": Model(Sequences, translation),
    }
    for make_models in (transformers_models, torchvision_models, diffusers_models):
        try:
            models_by_name |= make_models()
        except ImportError as error:
            print(f"left out: {make_models.__name__} ({error})")
    return models_by_name
