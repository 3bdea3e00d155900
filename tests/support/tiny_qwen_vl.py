"""Tiny checkpoints of the Qwen-VL families; `tiny_models.BUILDERS` names them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from tests.support import tiny_models

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""After that of the published Qwen2.5-VL: pictures and videos where they stand in a message."""

Model = Any
Built = tuple[Any, PreTrainedTokenizerFast]


def _tokenizer() -> tuple[PreTrainedTokenizerFast, dict[str, int], int]:
    """(with the marks of pictures and videos, the ids of these, the end token)."""
    tokenizer = tiny_models.llama_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})
    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    added: Any = [AddedToken(m, normalized=False, special=True) for m in marks]
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    ids = {mark: tiny_models.token_id(tokenizer, mark) for mark in marks}
    return tokenizer, ids, tiny_models.token_id(tokenizer, "<|im_end|>")


def built(
    model: Any, config: Any, vision: dict[str, Any], text: dict[str, Any], seed: int, tied: bool
) -> Built:
    """A model of this class, of a Qwen2 or Qwen3 with `text`'s changes."""
    tokenizer, ids, end = _tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 1024,
        "bos_token_id": None, "eos_token_id": end, "pad_token_id": end + 1, "tie_word_embeddings": tied,
    } | text  # fmt: skip
    whole = config(
        vision_config=vision, text_config=sizes, tie_word_embeddings=tied,
        **{f"{mark.strip('<|>').replace('pad', 'token')}_id": id for mark, id in ids.items() if "pad" in mark},
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    found = model(whole).eval()
    tiny_models.fill(found, (end - 1, end, end + 1, *ids.values()), torch.Generator().manual_seed(seed))
    return found, tokenizer


def _rope(sections: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **more}


def qwen2_5_vl(
    seed: int = 34, *, vision_layers: int = 3, vision_width: int = 32, window_size: int = 56,
    full: tuple[int, ...] = (1,), sections: tuple[int, int, int] = (4, 6, 6), tied: bool = False, **text_changes: Any,
) -> Built:  # fmt: skip
    """A Qwen2.5-VL of a tower with windows of 2 × 2 rows and a Qwen2 with M-RoPE (2 layers unless changed)."""
    text = {"rope_parameters": _rope(sections)} | text_changes
    vision = {
        "depth": vision_layers, "hidden_size": vision_width, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": text.get("hidden_size", 96), "fullatt_block_indexes": list(full), "window_size": window_size,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
    }  # fmt: skip
    return built(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, vision, text, seed, tied)


def qwen2_vl(
    seed: int = 34, *, vision_layers: int = 2, vision_width: int = 32, mlp_ratio: int = 2,
    sections: tuple[int, int, int] = (4, 6, 6), tied: bool = False, **text_changes: Any,
) -> Built:  # fmt: skip
    """A Qwen2-VL of a tower that sees whole pictures and a Qwen2 with M-RoPE (2 layers unless changed)."""
    text = {"rope_parameters": _rope(sections)} | text_changes
    vision = {
        "depth": vision_layers, "embed_dim": vision_width, "hidden_size": text.get("hidden_size", 96), "mlp_ratio": mlp_ratio,
        "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return built(Qwen2VLForConditionalGeneration, Qwen2VLConfig, vision, text, seed, tied)


def qwen3_vl(
    seed: int = 50, *, vision_layers: int = 3, vision_width: int = 32, deep: tuple[int, ...] = (0, 1), table_side: int = 5,
    sections: tuple[int, int, int] = (6, 5, 5), tied: bool = False, **text_changes: Any,
) -> Built:  # fmt: skip
    """A Qwen3-VL of a tower with a table of 5 × 5 positions, whose first two blocks also give what is added behind the first
    two layers of a Qwen3 with interleaved M-RoPE (2 layers unless changed)."""
    text = {"rope_parameters": _rope(sections, mrope_interleaved=True), "head_dim": 32} | text_changes
    vision = {
        "depth": vision_layers, "hidden_size": vision_width, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": text.get("hidden_size", 96), "deepstack_visual_indexes": list(deep), "patch_size": 16,
        "num_position_embeddings": table_side**2, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    return built(Qwen3VLForConditionalGeneration, Qwen3VLConfig, vision, text, seed, tied)


def save_processors(model: Model, folder: Path) -> None:
    """The settings of pictures and videos: transformers' processor of the whole model needs torchvision, for videos."""
    vision: Any = model.config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    normal: dict[str, Any] = {}
    least, most = 4 * unit**2, 8 * unit**2
    if isinstance(model, Qwen3VLForConditionalGeneration | Qwen3_5ForConditionalGeneration):
        normal = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        most *= 8  # of all frames together
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * unit**2, "longest_edge": 24 * unit**2},
        patch_size=vision.patch_size,
        **normal,
    ).save_pretrained(folder)
    size = {"shortest_edge": least, "longest_edge": most}
    (folder / "video_preprocessor_config.json").write_text(json.dumps({"size": size}))
