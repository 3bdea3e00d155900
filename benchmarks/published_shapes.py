"""What `vlmexport fit ALIAS` knows of published models: their sizes, traced from configurations alone.

    python -m benchmarks.published_shapes [ALIAS …]

Each model is a checkpoint of the published configuration whose weights are a hole in a file (nothing is on the disk, none
is read), with a small tokenizer of the same kind. What a build would write into the manifest of its graphs goes to
`exporter/published_shapes.json`, with the numbers that `--weights` makes integers in each. Facts of the configurations: `config.json` in each model's folder on the hub
(`Alias.hub_id`), as it is quoted in the places that `SOURCES` names; `TOTALS` are the numbers of parameters that are
published for the checkpoints, and the trace must come to them.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmexport.exporter.common.published_shapes import FILE, read_documents

SHARD = 4_000_000_000
"""Bytes of a file at most: a larger one may not be mapped on a small machine."""

CLIP = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14, "projection_dim": 768,
}  # fmt: skip
EVA = {
    "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16,
    "image_size": 224, "patch_size": 14,
}  # fmt: skip
BLIP2 = {
    "vision": EVA,
    "qformer": {
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "encoder_hidden_size": 1408,
    },
    "top": {"num_query_tokens": 32},
}  # fmt: skip
T5 = {"vocab_size": 32128, "d_kv": 64, "num_layers": 24, "num_decoder_layers": 24, "decoder_layers": 24,
      "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}  # fmt: skip
VICUNA_7B = {
    "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 4096,
}  # fmt: skip
VICUNA_13B = VICUNA_7B | {
    "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
    "num_key_value_heads": 40,
}  # fmt: skip
QWEN = {
    "vision": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "files": {
        "preprocessor_config.json": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        "video_preprocessor_config.json": {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 24576 * 28 * 28}},
    },
}  # fmt: skip
QWEN_TEXT = {
    "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
SIGLIP_BASE = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 512, "patch_size": 16,
}  # fmt: skip
SIGLIP_SO = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 14,
}  # fmt: skip


def smolvlm(
    scale: int, longest: int, vision: dict[str, Any], text: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """A SmolVLM or an Idefics 3."""
    tiled = {"scale_factor": scale, "longest": longest, **options}
    videos = {
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": vision["image_size"]}}
    }
    files = {} if "kind" in options else {"files": {"preprocessor_config.json": videos}}
    return {"tiny": "smolvlm", "options": tiled, "vision": vision, "text": text, **files}


QWEN2_VL = {
    "vision": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16},
    "files": QWEN["files"],
}
QWEN3_VL_FILES = {
    "preprocessor_config.json": {"size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    "video_preprocessor_config.json": {"size": {"shortest_edge": 4096, "longest_edge": 25165824}},
}


def qwen3_vl(layers: int, hidden: int, inner: int, heads: int, *, large: bool = False) -> dict[str, Any]:
    """A Qwen3-VL, with the tower of the 2B and 4B or the `large` one of the 8B."""
    tower = {
        "depth": 27 if large else 24, "hidden_size": 1152 if large else 1024, "num_heads": 16,
        "intermediate_size": 4304 if large else 4096, "out_hidden_size": hidden, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24] if large else [5, 11, 17],
    }  # fmt: skip
    text = llama(layers, hidden, inner, heads, 8, 151936, 262144) | {
        "head_dim": 128,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True,
        },
    }  # fmt: skip
    return {
        "tiny": "qwen3-vl", "options": {"tied": not large}, "text": text, "vision": tower, "files": QWEN3_VL_FILES,
    }  # fmt: skip


def qwen3_5(
    layers: int, hidden: int, inner: int, heads: int, values: int, *, small: bool = False
) -> dict[str, Any]:
    """A Qwen3.5 whose linear layers have `values` heads, with the tower of the 2B and 4B or the `small` one of the 0.8B."""
    tower = {
        "depth": 12 if small else 24, "hidden_size": 768 if small else 1024, "num_heads": 12 if small else 16,
        "intermediate_size": 3072 if small else 4096, "out_hidden_size": hidden, "num_position_embeddings": 2304,
    }  # fmt: skip
    text = llama(layers, hidden, inner, heads, heads // 4, 248320, 262144) | {
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": values, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10], "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    }  # fmt: skip
    return {
        "tiny": "qwen3.5",
        "options": {"tied": True},
        "text": text,
        "vision": tower,
        "files": QWEN3_VL_FILES,
    }


def llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int, most: int
) -> dict[str, Any]:
    """A text model of Llama's shape."""
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "max_position_embeddings": most,
    }  # fmt: skip


def qwen3(layers: int, hidden: int, inner: int, heads: int) -> dict[str, Any]:
    """A Qwen3 of text."""
    own = {"head_dim": 128, "max_window_layers": layers, "layer_types": ["full_attention"] * layers}
    return llama(layers, hidden, inner, heads, 8, 151936, 40960) | own


def gemma3(
    layers: int, hidden: int, inner: int, heads: int, vocabulary: int, window: int, full: dict[str, Any]
) -> dict[str, Any]:
    """A Gemma 3's language model; every sixth layer sees everything, with rotary positions of the kind `full`."""
    kinds = ["sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)]
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2) if heads > 4 else 1, "head_dim": 256,
        "query_pre_attn_scalar": 256, "layer_types": kinds, "sliding_window": window,
        "max_position_embeddings": 131072 if heads > 4 else 32768,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e6, **full},
        },
    }  # fmt: skip


def paligemma(language: str, side: int) -> dict[str, Any]:
    """A 3B of SigLIP and the 2B of Gemma or Gemma 2."""
    width = {"gemma": 2048, "gemma2": 2304}[language]
    text: dict[str, Any] = {
        "vocab_size": 257216, "hidden_size": width, "num_attention_heads": 8, "head_dim": 256,
        "max_position_embeddings": 8192, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    if language == "gemma":
        text |= {"intermediate_size": 16384, "num_hidden_layers": 18, "num_key_value_heads": 1}
    else:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(26)]
        text |= {
            "intermediate_size": 9216, "num_hidden_layers": 26, "num_key_value_heads": 4, "layer_types": kinds,
            "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        }  # fmt: skip
    return {
        "tiny": "paligemma2",
        "options": {"language": language},
        "text": text,
        "vision": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": side, "patch_size": 14, "projection_dim": width,
        },
        "top": {"projection_dim": width, "hidden_size": width},
    }  # fmt: skip


def internvl(language: str, text: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """InternViT-300M and a Qwen with a head of its own."""
    tower = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "attention_bias": True,
    }  # fmt: skip
    options = {"language": language, "image_side": 448, "patch_size": 14}
    return {
        "tiny": "internvl",
        "options": options,
        "vision": tower,
        "text": text | {"vocab_size": vocabulary},
    }


def internvl3(layers: int, hidden: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Over a Qwen2.5."""
    text = llama(layers, hidden, inner, heads, kv_heads, 151674, 32768)
    del text["head_dim"]
    return internvl("qwen2", text | {"layer_types": ["full_attention"] * layers}, 151674)


def lfm2_vl(hidden: int, inner: int, heads: int, tower: dict[str, Any]) -> dict[str, Any]:
    """SigLIP 2 over an LFM2 of 16 layers, 6 of them with attention."""
    attending = (2, 5, 8, 10, 12, 14)
    text = {
        "vocab_size": 65536, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 16,
        "num_attention_heads": heads, "num_key_value_heads": 8, "max_position_embeddings": 128000,
        "block_multiple_of": 256, "conv_L_cache": 3,
        "layer_types": ["full_attention" if layer in attending else "conv" for layer in range(16)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    settings = {
        "encoder_patch_size": 16, "tile_size": 512, "max_tiles": 10, "min_image_tokens": 64, "max_image_tokens": 256,
    }  # fmt: skip
    return {
        "tiny": "lfm2-vl", "text": text, "vision": tower | {"patch_size": 16, "num_patches": 256},
        "top": {"projector_hidden_size": 2560}, "files": {"preprocessor_config.json": settings},
    }  # fmt: skip


MODELS: dict[str, dict[str, Any]] = {
    "gemma3-4b": {
        "tiny": "gemma3",
        "text": gemma3(34, 2560, 10240, 8, 262208, 1024, {"rope_type": "linear", "factor": 8.0}),
        "vision": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "image_size": 896, "patch_size": 14,
        },
        "top": {"mm_tokens_per_image": 256},
    },
    "paligemma2-3b-pt-224": paligemma("gemma2", 224),
    "paligemma2-3b-mix-224": paligemma("gemma2", 224),
    "paligemma2-3b-mix-448": paligemma("gemma2", 448),
    "paligemma-3b-mix-224": paligemma("gemma", 224),
    "gemma3-1b": {"tiny": "gemma3-text", "text": gemma3(26, 1152, 6912, 4, 262144, 512, {"rope_type": "default"})},
    "gemma3-270m": {"tiny": "gemma3-text", "text": gemma3(18, 640, 2048, 4, 262144, 512, {"rope_type": "default"})},
    "blip2-flant5": {"tiny": "blip2-t5", "text": T5 | {"d_model": 2048, "d_ff": 5120, "num_heads": 32}, **BLIP2},
    "blip2-flant5-xxl": {"tiny": "blip2-t5", "text": T5 | {"d_model": 4096, "d_ff": 10240, "num_heads": 64}, **BLIP2},
    "blip2-opt": {
        "tiny": "blip2-opt",
        "text": {
            "vocab_size": 50304, "hidden_size": 2560, "word_embed_proj_dim": 2560, "ffn_dim": 10240,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        },
        **BLIP2,
    },
    "vit-gpt2": {
        "tiny": "vit-gpt2",
        "text": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
        "vision": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": 224, "patch_size": 16,
        },
    },
    "llava-1.5-7b": {"tiny": "llava", "text": VICUNA_7B, "vision": CLIP},
    "llava-1.5-13b": {"tiny": "llava", "text": VICUNA_13B, "vision": CLIP},
    "llava-1.6-vicuna-7b": {"tiny": "llava-next", "options": {"image_side": 336}, "text": VICUNA_7B, "vision": CLIP},
    "llava-1.6-vicuna-13b": {"tiny": "llava-next", "options": {"image_side": 336}, "text": VICUNA_13B, "vision": CLIP},
    "internvl3-1b": internvl3(24, 896, 4864, 14, 2),
    "internvl3-2b": internvl3(28, 1536, 8960, 12, 2),
    "internvl3-8b": internvl3(28, 3584, 18944, 28, 4),
    "internvl3.5-1b": internvl("qwen3", qwen3(28, 1024, 3072, 16), 151936),
    "internvl3.5-2b": internvl("qwen3", qwen3(28, 2048, 6144, 16), 151936),
    "internvl3.5-4b": internvl("qwen3", qwen3(36, 2560, 9728, 32), 151936),
    "internvl3.5-8b": internvl("qwen3", qwen3(36, 4096, 12288, 32), 151936),
    "lfm2-vl-450m": lfm2_vl(
        1024, 6656, 16, {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    ),
    "lfm2-vl-1.6b": lfm2_vl(
        2048, 12288, 32, {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26, "num_attention_heads": 16}
    ),
    "qwen2.5-vl-3b": {
        "tiny": "qwen2.5-vl",
        "options": {"tied": True},
        "text": QWEN_TEXT | {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 36,
        },
        **QWEN,
        "vision": QWEN["vision"] | {"out_hidden_size": 2048},
    },
    "qwen2.5-vl-7b": {
        "tiny": "qwen2.5-vl",
        "text": QWEN_TEXT | {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 28,
        },
        **QWEN,
        "vision": QWEN["vision"] | {"out_hidden_size": 3584},
    },
    "qwen2-vl-2b": {
        "tiny": "qwen2-vl",
        "options": {"tied": True},
        "text": QWEN_TEXT | {
            "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
            "num_attention_heads": 12, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 28,
            "max_position_embeddings": 32768,
        },
        **QWEN2_VL,
        "vision": QWEN2_VL["vision"] | {"hidden_size": 1536},
    },
    "qwen2-vl-7b": {
        "tiny": "qwen2-vl",
        "text": QWEN_TEXT | {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 28,
            "max_position_embeddings": 32768,
        },
        **QWEN2_VL,
        "vision": QWEN2_VL["vision"] | {"hidden_size": 3584},
    },
    "qwen3-vl-2b": qwen3_vl(28, 2048, 6144, 16),
    "qwen3-vl-4b": qwen3_vl(36, 2560, 9728, 32),
    "qwen3-vl-8b": qwen3_vl(36, 4096, 12288, 32, large=True),
    "qwen3.5-0.8b": qwen3_5(24, 1024, 3584, 8, 16, small=True),
    "qwen3.5-2b": qwen3_5(24, 2048, 6144, 8, 16),
    "qwen3.5-4b": qwen3_5(32, 2560, 9216, 16, 32),
    "smolvlm2-256m": smolvlm(4, 2048, SIGLIP_BASE, llama(30, 576, 1536, 9, 3, 49280, 8192)),
    "smolvlm2-500m": smolvlm(4, 2048, SIGLIP_BASE, llama(32, 960, 2560, 15, 5, 49280, 8192)),
    "smolvlm2-2.2b": smolvlm(
        3, 1536, SIGLIP_SO | {"image_size": 384}, llama(24, 2048, 8192, 32, 32, 49280, 8192), image_side=27, patch_size=9
    ),
    "smolvlm-256m": smolvlm(4, 2048, SIGLIP_BASE, llama(30, 576, 1536, 9, 3, 49280, 8192), kind="idefics3"),
    "smolvlm-500m": smolvlm(4, 2048, SIGLIP_BASE, llama(32, 960, 2560, 15, 5, 49280, 8192), kind="idefics3"),
    "idefics3-8b": smolvlm(
        2, 1456, SIGLIP_SO | {"image_size": 364}, llama(32, 4096, 14336, 32, 8, 128259, 10240), kind="idefics3"
    ),
    "smollm2-135m": {"tiny": "llama-tied", "text": llama(30, 576, 1536, 9, 3, 49152, 8192)},
    "smollm2-360m": {"tiny": "llama-tied", "text": llama(32, 960, 2560, 15, 5, 49152, 8192)},
    "smollm2-1.7b": {"tiny": "llama-tied", "text": llama(24, 2048, 8192, 32, 32, 49152, 8192)},
    "qwen2.5-0.5b": {
        "tiny": "qwen2",
        "text": llama(24, 896, 4864, 14, 2, 151936, 32768) | {"layer_types": ["full_attention"] * 24},
    },
    "qwen3-0.6b": {"tiny": "qwen3", "text": qwen3(28, 1024, 3072, 16)},
    "qwen3-1.7b": {"tiny": "qwen3", "text": qwen3(28, 2048, 6144, 16)},
    "qwen3-4b": {"tiny": "qwen3", "text": qwen3(36, 2560, 9728, 32)},
    "qwen3-8b": {"tiny": "qwen3", "options": {"tie_word_embeddings": False}, "text": qwen3(36, 4096, 12288, 32)},
    "tinyllama-1.1b": {"tiny": "llama", "text": llama(22, 2048, 5632, 32, 4, 32000, 2048)},
}  # fmt: skip

MODELS["cosmos-reason1-7b"] = MODELS["qwen2.5-vl-7b"]
MODELS |= {f"cosmos-reason2-{size}": MODELS[f"qwen3-vl-{size}"] for size in ("2b", "8b")}

SOURCES = {
    "gemma3": "https://github.com/huggingface/transformers/blob/main/src/transformers/models/gemma3/convert_gemma3_weights.py; "
    "tests/integration/published/checkpoints/google--gemma-3-4b-it",
    "paligemma": "https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/paligemma/"
    "convert_paligemma2_weights_to_hf.py, convert_paligemma_weights_to_hf.py",
    "llava-1.5": "https://huggingface.co/docs/transformers/model_doc/llava, LlavaConfig's defaults; "
    "https://huggingface.co/liuhaotian/llava-v1.5-13b",
    "llava-1.6": "https://huggingface.co/docs/transformers/model_doc/llava_next",
    "blip2": "https://github.com/huggingface/transformers/blob/main/src/transformers/models/blip_2/"
    "convert_blip_2_original_to_pytorch.py",
    "internvl": "https://github.com/shivangjhalani/multicoco/blob/7741240be24c5c65b3f16b1980dfdb34c1b6e3ab/InternVL3-1B_data.md; "
    "https://github.com/OpenGVLab/InternVL/blob/5d8ab0e48dcc874f523e2723c431ebd8733bde09/internvl_chat/tools/internvl_custom2hf.py",
    "flant5-xxl": "https://github.com/OpenBMB/BMInf/blob/main/bminf/arch/t5/config.py (T5 1.1 XXL)",
    "qwen2.5-vl": "https://github.com/acproject/duorou/blob/main/docs/qwen2.5vl_graph.md",
    "qwen3": "https://github.com/Joinn99/GR/blob/e6d4479e91695f63053ea575b6ce9bd8e98b1d25/config/modified_qwen3.py; "
    "tests/integration/published/checkpoints/Qwen--Qwen3-8B",
    "qwen2-vl": "tests/integration/published/checkpoints/Qwen--Qwen2-VL-2B-Instruct, Qwen--Qwen2-VL-7B-Instruct",
    "lfm2-vl": "https://github.com/varun00391/local-finetuned-model (config.json of the first release of the 450M); the sizes of "
    "the 1.6B from memory",
    "qwen3-vl": "tests/integration/published/checkpoints/Qwen--Qwen3-VL-4B-Instruct; the sizes of the 2B and 8B from memory",
    "qwen3.5": "tests/integration/published/checkpoints/Qwen--Qwen3.5-0.8B; https://apxml.com/models/qwen35-4b; the sizes of the "
    "2B from memory",
    "smolvlm": "the folders of their names in tests/integration/published/checkpoints",
    "smollm2": "https://github.com/satyasundar/erav3-s13/blob/main/README.md, "
    "https://github.com/JXL884/Entropy-aware-branching/blob/main/entropix/models/smollm.py",
}

TOTALS = {
    "paligemma2-3b-pt-224": 3_032_242_416, "paligemma-3b-mix-224": 2_923_466_480,
    "gemma3-4b": 4_300_079_472, "gemma3-1b": 999_885_952, "gemma3-270m": 268_098_176,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384, "llava-1.5-7b": 7_063_427_072,
    "qwen2.5-vl-3b": 3_754_622_976, "qwen2.5-vl-7b": 8_292_166_656, "tinyllama-1.1b": 1_100_048_384,
    "qwen2.5-0.5b": 494_032_768, "blip2-flant5": 3_942_446_592, "blip2-opt": 3_744_761_856,
    "qwen2-vl-2b": 2_208_985_600, "qwen2-vl-7b": 8_291_375_616, "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696,
    "internvl3-1b": 938_193_024,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "smolvlm2-256m": 256_484_928, "smolvlm2-500m": 507_482_304, "smolvlm2-2.2b": 2_246_784_880,
    "smolvlm-256m": 256_484_928, "smolvlm-500m": 507_482_304,
}  # fmt: skip
"""Parameters of published checkpoints, as their users count them; every tensor once."""


def make(case: dict[str, Any], folder: Path) -> int:
    """Writes a checkpoint whose weights are a hole, and returns its number of parameters."""
    import torch
    from safetensors.torch import load_file

    from tests.support import tiny_models

    tiny, tokenizer = tiny_models.BUILDERS[case["tiny"]](**case.get("options", {}))
    config: Any = tiny.config
    text = getattr(config, "text_config", None) or getattr(config, "decoder", None) or config
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None)
    qformer = getattr(config, "qformer_config", None)
    parts = (text, case["text"]), (vision, case.get("vision", {})), (qformer, case.get("qformer", {}))
    for part, changes in (*parts, (config, case.get("top", {}))):
        for key, value in changes.items():
            setattr(part, key, value)
    tiny_models.save(tiny, tokenizer, folder, image_side=case.get("vision", {}).get("image_size"))
    stored = set(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    for name, content in case.get("files", {}).items():
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | content))
    with torch.device("meta"):
        model = type(tiny)(config)
    once = dict(model.named_parameters())
    # transformers ties T5's head, whose checkpoints have both: what is stored of a small one is of a large one, too.
    every = model.named_parameters(remove_duplicate=False)
    shapes = {name: list(value.shape) for name, value in every if name in once or name in stored}
    write_holes(shapes, folder)
    return sum(map(math.prod, shapes.values()))


def write_holes(shapes: dict[str, list[int]], folder: Path) -> None:
    """Safetensors files of float16, each below 4 GB, whose numbers take no room on the disk."""
    shards: list[dict[str, list[int]]] = [{}]
    total = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if total + size > SHARD and shards[-1]:
            shards.append({})
            total = 0
        shards[-1][name] = shape
        total += size
    table = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}.safetensors"
        write_hole(shard, folder / file)
        table |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def write_hole(shapes: dict[str, list[int]], path: Path) -> None:
    """One of the files."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def traced(alias: str) -> dict[str, Any]:
    """What `exporter/common/published_shapes.py` reads."""
    from vlmexport.exporter.common.aliases import find_alias
    from vlmexport.exporter.pipeline.export import export
    from vlmexport.exporter.pipeline.prepare import prepare
    from vlmexport.exporter.pipeline.request import BuildRequest

    known = find_alias(alias)
    assert known is not None
    with tempfile.TemporaryDirectory() as place:
        parameters = make(MODELS[alias], Path(place) / alias)
        if TOTALS.get(alias, parameters) != parameters:
            raise SystemExit(f"{alias}: {parameters:,} parameters, published are {TOTALS[alias]:,}")
        request = BuildRequest(model=f"{place}/{alias}", output=Path("-"), force=True)
        prepared = prepare(request, write=False)
        export(prepared)
        integers = {}
        if prepared.family.decoder.linear_attention is None:  # of which there are none
            narrow = prepare(replace(request, weights="int8"), write=False)
            export(narrow)
            integers = {
                name: graph.integers for name, graph in narrow.manifest.graphs.items() if graph.integers
            }
    manifest = prepared.manifest.to_dict()
    manifest["model"] |= {"source": alias, "fingerprint": "", "trained_from": None}
    for graph in manifest["graphs"].values():
        graph.update(inputs=[], outputs=[])
        for form in ("float32", "folded", "float32_folded"):
            graph.pop(form, None)
    ids = ("pad_token_id", "bos_token_id", "decoder_start_token_id", "image_token_id")
    manifest["text"] |= dict.fromkeys((*ids, "chat_template")) | {
        "eos_token_ids": []
    }  # the small tokenizer's
    manifest["text"].pop("special_tokens", None)
    manifest["text"]["default_prompt"] = known.default_prompt
    for name in ("producer", "files", "parity", "plans", "generation"):
        manifest[name] = type(manifest[name])()
    return {
        "model": f"https://huggingface.co/{known.hub_id}",
        "parameters": parameters,
        "max_positions": prepared.family.max_positions,
        "needed_rows": prepared.family.needed_embeds,
        "integers": integers,
        "manifest": manifest,
    }


def text_of(documents: dict[str, Any]) -> str:
    """A line for each model: spaces would be a part of every wheel."""
    lines = (
        f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}"
        for name, row in sorted(documents.items())
    )
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("alias", nargs="*", default=list(MODELS))
    documents = read_documents() if FILE.is_file() else {}
    for alias in parser.parse_args().alias:
        documents[alias] = traced(alias)
        FILE.write_text(text_of(documents), "utf-8")
        print(f"{alias}: {documents[alias]['parameters']:,} parameters", flush=True)


if __name__ == "__main__":
    main()
