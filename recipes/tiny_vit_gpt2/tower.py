"""The trained image tower of ``tiny-blip2-flant5`` as a ViT: other names, other normalisation, the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Blip2ForConditionalGeneration

from ..common.folder import digest
from ..tiny_blip2_flant5.model import MEAN, STD

_LAYER = {
    "layer_norm1": "layernorm_before",
    "layer_norm2": "layernorm_after",
    "self_attn.projection": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


def vit_weights(blip: dict[str, Tensor]) -> dict[str, Tensor]:
    """State of a ViTModel without its pooler from that of a Blip2VisionModel; both are pre-norm.

    The ViT takes pixels normalised with mean and deviation 0.5, BLIP-2 with CLIP's: the difference is a scale and a
    shift per channel, which the patch embedding takes up.
    """
    kernel, bias = blip["embeddings.patch_embedding.weight"], blip["embeddings.patch_embedding.bias"]
    mean, std = (torch.tensor(v, dtype=kernel.dtype)[None, :, None, None] for v in (MEAN, STD))
    result = {
        "embeddings.cls_token": blip["embeddings.class_embedding"],
        "embeddings.position_embeddings": blip["embeddings.position_embedding"],
        "embeddings.patch_embeddings.projection.weight": kernel * (0.5 / std),
        "embeddings.patch_embeddings.projection.bias": bias + (kernel * ((0.5 - mean) / std)).sum((1, 2, 3)),
        "layernorm.weight": blip["post_layernorm.weight"],
        "layernorm.bias": blip["post_layernorm.bias"],
    }
    layers = 1 + max(int(name.split(".")[2]) for name in blip if name.startswith("encoder.layers."))
    for i in range(layers):
        for kind in ("weight", "bias"):
            for old, new in _LAYER.items():
                result[f"layers.{i}.{new}.{kind}"] = blip[f"encoder.layers.{i}.{old}.{kind}"]
            joined = blip[f"encoder.layers.{i}.self_attn.qkv.{kind}"].chunk(3)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), joined, strict=True):
                result[f"layers.{i}.attention.{name}.{kind}"] = part.clone()
    return result


def take_tower(model: Any, folder: Path) -> str:
    """Copies the tower of a trained `tiny-blip2-flant5` folder into a ViT-GPT2; returns a name for those weights.

    The pooler, which no caption reads, stays fresh.
    """
    old = Blip2ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    missing, unexpected = model.encoder.load_state_dict(
        vit_weights(old.vision_model.state_dict()), strict=False
    )
    assert not unexpected and all(name.startswith("pooler.") for name in missing), (missing, unexpected)
    return digest(folder / "model.safetensors")
