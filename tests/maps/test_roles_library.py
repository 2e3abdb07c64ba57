"""Roles in models of the transformers library, from small configurations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import pullback as pb

pytest.importorskip("transformers")
models = pytest.importorskip("pullback_experiments.benchmarks.third_party_models")
more = pytest.importorskip("pullback_experiments.benchmarks.third_party_others")

#: by model, some parameters with role and split
EXPECTED: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "graph network, plain torch": {"self_maps.0": ("matrix", (32,)), "head": ("head", (2,))},
    "GPT-2": {
        "transformer.wte.weight": ("embedding", ()),
        "transformer.h.1.attn.c_attn.weight": ("matrix", (48, 48, 48)),
        "transformer.h.1.mlp.c_fc.weight": ("matrix", (192,)),
        "transformer.ln_f.weight": ("vector", ()),
    },
    "Llama": {
        "model.layers.0.self_attn.k_proj.weight": ("matrix", (24,)),
        "model.embed_tokens.weight": ("embedding", ()),
        "lm_head.weight": ("head", (48,)),
    },
    "Mixtral": {
        "model.layers.0.mlp.experts.gate_up_proj": ("experts", (96, 96)),
        "model.layers.1.mlp.experts.down_proj": ("experts", (48,)),
        "lm_head.weight": ("head", (48,)),
    },
    "Mixtral, experts in a loop": {
        "model.layers.0.mlp.experts.gate_up_proj": ("experts", (96, 96)),
    },
    "Mixtral, experts gathered": {
        "model.layers.0.mlp.experts.gate_up_proj": ("experts", (96, 96)),
    },
    "Mamba": {
        "backbone.layers.0.mixer.in_proj.weight": ("matrix", (96, 96)),
        "backbone.layers.0.mixer.x_proj.weight": ("matrix", (3, 8, 8)),
        "backbone.layers.0.mixer.conv1d.weight": ("vector", ()),
        "backbone.layers.0.mixer.A_log": ("vector", ()),
        "backbone.embeddings.weight": ("embedding", ()),
    },
    "BERT": {
        "bert.embeddings.position_embeddings.weight": ("embedding", ()),
        "bert.encoder.layer.0.attention.self.query.weight": ("matrix", (48,)),
        "bert.pooler.dense.weight": ("matrix", (48,)),
        "classifier.weight": ("head", (3,)),
    },
    "T5": {"shared.weight": ("embedding", ())},
    "ViT": {
        "vit.embeddings.patch_embeddings.projection.weight": ("convolution", (48,)),
        "vit.embeddings.position_embeddings": ("embedding", ()),
        "vit.embeddings.cls_token": ("vector", ()),
        "classifier.weight": ("head", (5,)),
    },
    "CLIP": {"visual_projection.weight": ("matrix", (32,)), "logit_scale": ("vector", ())},
    "ConvNeXt V2": {
        "convnextv2.encoder.stages.0.layers.0.dwconv.weight": ("vector", ()),
        "convnextv2.encoder.stages.0.layers.0.pwconv1.weight": ("matrix", (96,)),
        "classifier.weight": ("head", (5,)),
    },
    "GPT-NeoX": {"gpt_neox.layers.0.attention.query_key_value.weight": ("matrix", (144,))},
    "Mamba2": {"backbone.layers.0.mixer.in_proj.weight": ("matrix", (96, 96, 8, 8, 6))},
    "Wav2Vec2-Conformer": {
        "wav2vec2_conformer.encoder.layers.0.conv_module.pointwise_conv1.weight": (
            "convolution",
            (48, 48),
        ),
    },
    "U-Net, plain torch": {"head.weight": ("head", (2,)), "up.weight": ("convolution", (16,))},
}


@pytest.fixture(scope="module")
def all_models() -> dict[str, Any]:
    return models.models() | more.list_other_models()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPECTED)
def test_roles(name: str, all_models: dict[str, Any]) -> None:
    torch.manual_seed(0)
    case = all_models[name]
    model: nn.Module = case.make()
    inputs, _ = case.batch(torch.Generator().manual_seed(0))
    roles = {row.name: (row.role.value, row.split) for row in pb.parameter_roles(model, **inputs)}
    assert roles.keys() == {name for name, _ in model.named_parameters()}
    assert {parameter: roles[parameter] for parameter in EXPECTED[name]} == EXPECTED[name]
