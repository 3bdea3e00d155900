"""Tiny checkpoints of Qwen3.5; `tiny_models.BUILDERS` names them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from tests.support import tiny_models, tiny_qwen_vl

LINEAR, FULL = "linear_attention", "full_attention"


def qwen3_5(
    seed: int = 50, *, vision_layers: int = 2, vision_width: int = 32, table_side: int = 5,
    layer_types: Sequence[str] = (LINEAR, FULL, LINEAR), sections: tuple[int, int, int] = (2, 1, 1), tied: bool = False,
    **text_changes: Any,
) -> tiny_qwen_vl.Built:  # fmt: skip
    """A Qwen3.5 of a tower with a table of 5 × 5 positions, and layers of both kinds: two value heads share a key head, a
    quarter of an attention head turns."""
    rope = {
        "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    text = {
        "rope_parameters": rope, "head_dim": 32, "num_hidden_layers": len(layer_types), "layer_types": list(layer_types),
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    } | text_changes  # fmt: skip
    vision = {
        "depth": vision_layers, "hidden_size": vision_width, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": text.get("hidden_size", 96), "patch_size": 16,
        "num_position_embeddings": table_side**2, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return tiny_qwen_vl.built(Qwen3_5ForConditionalGeneration, Qwen3_5Config, vision, text, seed, tied)


def fill(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Weights with which states remember between one and some fifty rows, and greedy output varies."""
    tiny_models.fill_qwen_tower(model.model.visual, generator)
    tiny_models.fill_llama(model, silent, generator)
    body = model.model.language_model
    if model.lm_head.weight is body.embed_tokens.weight:  # see `fill_llama`: of 1 + w, the signs turn
        signs = torch.randint(0, 2, body.norm.weight.shape, generator=generator) * 2.0 - 1.0
        body.norm.weight.data.add_(1.0).mul_(signs).sub_(1.0)
    for layer in body.layers:
        if hasattr(layer, "self_attn"):
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.data.add_(0.6)
            continue
        net = layer.linear_attn
        net.conv1d.weight.data.normal_(0.0, 0.7, generator=generator)
        net.A_log.data.uniform_(-4.0, 0.5, generator=generator)
        net.dt_bias.data.normal_(0.0, 0.5, generator=generator)
        net.norm.weight.data.normal_(1.0, 0.1, generator=generator)
        net.out_proj.weight.data.mul_(2.0)


def add_mtp(folder: Path, seed: int = 16) -> Path:
    """Gives the checkpoint in `folder` a head for multi-token prediction with random weights, as its authors' hold one."""
    config: Any = Qwen3_5Config.from_pretrained(folder).text_config
    width, size, heads, inner = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.intermediate_size,
    )
    keys, layer = config.num_key_value_heads * size, "mtp.layers.0."
    shapes = {
        "mtp.fc.weight": (width, 2 * width),
        f"{layer}self_attn.q_proj.weight": (2 * heads * size, width),
        f"{layer}self_attn.k_proj.weight": (keys, width),
        f"{layer}self_attn.v_proj.weight": (keys, width),
        f"{layer}self_attn.o_proj.weight": (width, heads * size),
        f"{layer}mlp.gate_proj.weight": (inner, width),
        f"{layer}mlp.up_proj.weight": (inner, width),
        f"{layer}mlp.down_proj.weight": (width, inner),
    }
    norms: dict[str, Any] = {
        **dict.fromkeys(("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"), width),
        **dict.fromkeys((f"{layer}input_layernorm", f"{layer}post_attention_layernorm"), width),
        **dict.fromkeys((f"{layer}self_attn.q_norm", f"{layer}self_attn.k_norm"), size),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / "model.safetensors")
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape, generator=generator) * 1.5 / shape[1] ** 0.5
    for name, count in norms.items():
        tensors[f"{name}.weight"] = torch.randn(count, generator=generator) * 0.2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
