"""Models that are in no table, with the same tasks: a test of defaults chosen on others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pullback as pb

from .third_party_models import (
    CLASSES,
    IMAGE_SIZES,
    SOUND_SIZES,
    TEXT_SIZES,
    WORDS,
    Batch,
    Model,
    make_counting_batch,
    nodes,
    pictures,
    sentences,
    sounds,
    text,
)

# --- tasks ------------------------------------------------------------------------------------


def words(random: torch.Generator) -> Batch:
    x, y = make_counting_batch(random)
    return {"input_ids": x}, y


def waves(random: torch.Generator) -> Batch:
    """Which of five frequencies a noisy signal has."""
    y = torch.randint(0, CLASSES, (16,), generator=random)
    shift = 6.28 * torch.rand(16, 1, generator=random)
    wave = torch.sin(torch.arange(64) * (0.1 + 0.1 * y[:, None]) + shift)
    return {"x": wave[:, None] + 0.5 * torch.randn(16, 1, 64, generator=random)}, y


def clean(random: torch.Generator) -> Batch:
    """A picture without its noise."""
    images, y = pictures("x", 16)(random)
    angle = (3.14159 * y / CLASSES)[:, None, None]
    times = torch.arange(16) / 4
    wave = torch.sin(times[:, None] * angle.cos() + times * angle.sin())
    return images, wave[:, None].expand_as(images["x"]).contiguous()


def make_marked_batch(random: torch.Generator) -> Batch:
    """Where a wave is positive, per place."""
    images, target = clean(random)
    return images, (target[:, 0] > 0).long()


def series(random: torch.Generator) -> Batch:
    """The continuation of two sines."""
    rate = 0.1 + 0.2 * torch.rand(16, 1, 2, generator=random)
    shift = 6.28 * torch.rand(16, 1, 2, generator=random)
    wave = torch.sin(rate * torch.arange(40)[:, None] + shift)
    past = wave[:, :32] + 0.1 * torch.randn(16, 32, 2, generator=random)
    return {"past_values": past}, wave[:, 32:]


# --- models in plain torch --------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent network between embeddings and logits."""

    def __init__(self, cell: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.head = nn.Linear(48, WORDS)
        self.cell = cell(32, 48, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.cell(self.words(input_ids))[0])


class GraphAttention(nn.Module):
    """Messages weighted by additive attention along edges."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [8, width, width]
        self.maps = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.scores = nn.ModuleList(nn.Linear(width, 2) for _ in self.maps)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        edges = (edges + torch.eye(edges.shape[-1])).clamp(max=1)
        for value_map, score in zip(self.maps, self.scores, strict=True):
            x = value_map(x)
            a, b = score(x).unbind(-1)
            weight = F.leaky_relu(a[:, :, None] + b[:, None], 0.2).masked_fill(edges == 0, -1e9)
            x = F.elu(weight.softmax(-1) @ x)
        return self.head(x)


class Mixer(nn.Module):
    """MLPs over places and over channels in turn."""

    def __init__(self, width: int = 32, positions: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        sizes = [positions, width, positions, width]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Linear(2 * n, n)) for n in sizes
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        for i, (norm, block) in enumerate(zip(self.norms, self.blocks, strict=True)):
            y = norm(x)
            if i % 2:
                x = x + block(y)
            else:
                x = x + block(y.mT).mT
        return self.head(x.mean(1))


class Segmentation(nn.Module):
    """A small U-Net: classes per place."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.pair(a, b) for a, b in ((3, 16), (16, 32)))
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), self.pair(32, 16)
        self.head = nn.Conv2d(16, 2, 1)

    @staticmethod
    def pair(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        one = self.down[0](x)
        two = self.down[1](F.max_pool2d(one, 2))
        y = self.last(torch.cat([one, self.up(two)], 1))
        return self.head(y).movedim(1, -1)


def plain_models() -> dict[str, Model]:
    def signals() -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(
                    nn.Conv1d(1, 16, 7, 2), nn.BatchNorm1d(16), nn.ReLU(),
                    nn.Conv1d(16, 32, 5, 2), nn.BatchNorm1d(32), nn.ReLU(),
                    nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, CLASSES),
                )  # fmt: skip

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        return Net()

    def autoencoder() -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(
                    nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
                    nn.Flatten(), nn.Linear(512, 24), nn.Linear(24, 512),
                    nn.Unflatten(1, (32, 4, 4)), nn.ReLU(),
                    nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
                    nn.ConvTranspose2d(16, 3, 4, 2, 1),
                )  # fmt: skip

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        return Net()

    mse = pb.likelihoods.MSE()
    return {
        "LSTM": Model(lambda: Recurrent(nn.LSTM), words),
        "1-D convolutions": Model(signals, waves),
        "autoencoder": Model(autoencoder, clean, mse),
        "graph attention": Model(GraphAttention, nodes),
        "GRU": Model(lambda: Recurrent(nn.GRU), words),
        "MLP-Mixer": Model(Mixer, pictures("x")),
        "U-Net, plain torch": Model(Segmentation, make_marked_batch),
    }


# --- models of packages -----------------------------------------------------------------------


def torchvision_models() -> dict[str, Model]:
    from torchvision import models as tv
    from torchvision.models.googlenet import BasicConv2d, Inception

    def inception() -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(
                    BasicConv2d(3, 16, kernel_size=3, padding=1), nn.MaxPool2d(2),
                    Inception(16, 8, 8, 16, 4, 8, 8), nn.MaxPool2d(2),
                    Inception(40, 16, 16, 32, 4, 8, 8),
                    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
                )  # fmt: skip

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        return Net()

    def vgg() -> nn.Module:
        model: Any = tv.VGG(tv.vgg.make_layers([16, "M", 32, "M", 64, "M"]), num_classes=CLASSES)
        model.avgpool = nn.AdaptiveAvgPool2d(2)
        model.classifier = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        return model

    def maxvit() -> nn.Module:
        return tv.MaxVit(
            input_size=(32, 32), stem_channels=16, partition_size=4, block_channels=[16, 32],
            block_layers=[1, 1], head_dim=8, stochastic_depth_prob=0.0, num_classes=CLASSES,
        )  # fmt: skip

    def efficientnet() -> nn.Module:
        one = tv.efficientnet.FusedMBConvConfig
        two = tv.efficientnet.MBConvConfig
        blocks = [one(1, 3, 1, 16, 16, 1), one(4, 3, 2, 16, 24, 1), two(4, 3, 2, 24, 32, 2)]
        return tv.EfficientNet(blocks, 0.0, num_classes=CLASSES, last_channel=64)

    def resnext() -> nn.Module:
        model: Any = tv.ResNet(
            tv.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=8, width_per_group=4
        )
        model.layer3 = nn.Identity()
        model.layer4 = nn.Identity()
        model.fc = nn.Linear(512, CLASSES)
        return model

    regnet = tv.regnet.BlockParams([1, 2], [16, 32], [8, 8], [1.0, 1.0], [2, 2], 0.25)
    models_by_name = {
        "DenseNet": lambda: tv.DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES),
        "Inception": inception,
        "SqueezeNet": lambda: tv.squeezenet1_1(num_classes=CLASSES, dropout=0.0),
        "MNASNet": lambda: tv.MNASNet(0.35, num_classes=CLASSES, dropout=0.0),
        "ShuffleNet": lambda: tv.shufflenet_v2_x0_5(num_classes=CLASSES),
        "RegNet": lambda: tv.RegNet(regnet, num_classes=CLASSES, stem_width=16),
        "MaxViT": maxvit,
        "VGG": vgg,
        "MobileNetV2": lambda: tv.mobilenet_v2(num_classes=CLASSES, width_mult=0.25, dropout=0.0),
        "EfficientNetV2": efficientnet,
        "ResNeXt": resnext,
    }
    return {name: Model(make, pictures("x")) for name, make in models_by_name.items()}


def transformers_models() -> dict[str, Model]:
    import transformers as hf

    label = {"num_labels": 3, "max_position_embeddings": 32}
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32],
             "patch_sizes": [7, 3], "strides": [4, 2], "num_labels": CLASSES}  # fmt: skip

    def opt() -> nn.Module:
        options = {k: v for k, v in TEXT_SIZES.items() if k != "intermediate_size"}
        return hf.OPTForCausalLM(hf.OPTConfig(**options, ffn_dim=96, word_embed_proj_dim=48))

    def segformer() -> nn.Module:
        return hf.SegformerForImageClassification(hf.SegformerConfig(
            **sizes, sr_ratios=[2, 1], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
            drop_path_rate=0.0, hidden_dropout_prob=0.0, classifier_dropout_prob=0.0,
        ))  # fmt: skip

    def conformer() -> nn.Module:
        return hf.Wav2Vec2ConformerForSequenceClassification(hf.Wav2Vec2ConformerConfig(
            **SOUND_SIZES, conv_depthwise_kernel_size=7, max_source_positions=100,
        ))  # fmt: skip

    def mamba2() -> nn.Module:
        return hf.Mamba2ForCausalLM(hf.Mamba2Config(
            vocab_size=WORDS, hidden_size=48, num_hidden_layers=2, state_size=8, num_heads=6,
            head_dim=16, n_groups=1, chunk_size=4, expand=2, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        ))  # fmt: skip

    def mobilevit() -> nn.Module:
        return hf.MobileViTForImageClassification(hf.MobileViTConfig(
            image_size=32, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
            num_attention_heads=2, num_labels=CLASSES, hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ))  # fmt: skip

    def levit() -> nn.Module:
        return hf.LevitForImageClassification(hf.LevitConfig(
            image_size=64, hidden_sizes=[32, 48, 64], num_attention_heads=[2, 2, 2],
            depths=[1, 1, 1], key_dim=[8, 8, 8], drop_path_rate=0, attention_ratio=[2, 2, 2],
            mlp_ratio=[2, 2, 2], num_labels=CLASSES,
        ))  # fmt: skip

    def rwkv() -> nn.Module:
        return hf.RwkvForCausalLM(hf.RwkvConfig(
            vocab_size=WORDS, hidden_size=48, attention_hidden_size=48, num_hidden_layers=2,
            context_length=32, bos_token_id=1, eos_token_id=2,
        ))  # fmt: skip

    def patchtst() -> nn.Module:
        return hf.PatchTSTForPrediction(hf.PatchTSTConfig(
            num_input_channels=2, context_length=32, prediction_length=8, patch_length=4,
            patch_stride=4, d_model=32, num_attention_heads=4, ffn_dim=64, num_hidden_layers=2,
            loss="mse", scaling=None, attention_dropout=0.0, ff_dropout=0.0, head_dropout=0.0,
        ))  # fmt: skip

    pixels = pictures("pixel_values")
    plain = text(use_cache=False)
    settings = {
        "RoBERTa": (hf.RobertaForSequenceClassification, hf.RobertaConfig,
                    {**TEXT_SIZES, **label}, sentences),
        "ALBERT": (hf.AlbertForSequenceClassification, hf.AlbertConfig,
                   {**TEXT_SIZES, **label, "embedding_size": 32}, sentences),
        "DeBERTa-v2": (hf.DebertaV2ForSequenceClassification, hf.DebertaV2Config,
                       {**TEXT_SIZES, **label}, sentences),
        "GPT-NeoX": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, TEXT_SIZES, plain),
        "BEiT": (hf.BeitForImageClassification, hf.BeitConfig,
                 {**IMAGE_SIZES, "drop_path_rate": 0.0}, pixels),
        "ConvNeXt V2": (hf.ConvNextV2ForImageClassification, hf.ConvNextV2Config,
                        {"num_stages": 2, "hidden_sizes": [24, 48], "depths": [1, 1],
                         "num_labels": CLASSES, "image_size": 32}, pixels),
        "Phi": (hf.PhiForCausalLM, hf.PhiConfig, TEXT_SIZES, plain),
        "ELECTRA": (hf.ElectraForSequenceClassification, hf.ElectraConfig,
                    {**TEXT_SIZES, **label, "embedding_size": 48}, sentences),
        "DeiT": (hf.DeiTForImageClassification, hf.DeiTConfig, IMAGE_SIZES, pixels),
    }  # fmt: skip
    out = {
        name: Model(
            lambda model_class=architecture, config=config, options=configuration: model_class(
                config(**options)
            ),
            batch,
        )
        for name, (architecture, config, configuration, batch) in settings.items()
    }
    return out | {
        "OPT": Model(opt, plain),
        "SegFormer": Model(segformer, pixels),
        "Wav2Vec2-Conformer": Model(conformer, sounds),
        "Mamba2": Model(mamba2, plain),
        "MobileViT": Model(mobilevit, pixels),
        "LeViT": Model(levit, pictures("pixel_values", 64)),
        "RWKV": Model(rwkv, plain),
        "PatchTST": Model(patchtst, series, pb.likelihoods.MSE(), output="prediction_outputs"),
    }


#: run before the default of networks with batch norms was changed; its results were looked at
FIRST = (
    "DenseNet", "Inception", "SqueezeNet", "MNASNet", "ShuffleNet", "RegNet", "MaxViT", "VGG",
    "RoBERTa", "ALBERT", "DeBERTa-v2", "OPT", "GPT-NeoX", "SegFormer", "BEiT", "ConvNeXt V2",
    "Wav2Vec2-Conformer", "Mamba2", "LSTM", "1-D convolutions", "autoencoder", "graph attention",
)  # fmt: skip
#: run once, after that
SECOND = (
    "MobileNetV2", "EfficientNetV2", "ResNeXt", "Phi", "ELECTRA", "DeiT", "MobileViT", "LeViT",
    "RWKV", "PatchTST", "GRU", "MLP-Mixer", "U-Net, plain torch",
)  # fmt: skip


def list_other_models() -> dict[str, Model]:
    """Every one of these models whose package is installed, in the order of the two lists."""
    models = plain_models()
    for make_models in (transformers_models, torchvision_models):
        try:
            models |= make_models()
        except ImportError as error:
            print(f"left out: {make_models.__name__} ({error})")
    return {name: models[name] for name in (*FIRST, *SECOND) if name in models}
