"""Architecture of ``tiny-qwen2.5-vl``: the classes of Qwen2.5-VL at 3 million parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)
from vlmexport.calibration.data.scenes.film import FRAMES, RATE

from ..common.folder import half_in
from .tokenizer import IMAGE, VIDEO
from .tower import GRID, MEAN, SIDE, STD, WIDTH, tower_config

DECODER_LAYERS = 12
POSITIONS = 2048
FROZEN = ("model.visual.",)
"""Names of the tower begin with this; the language model is trained with it frozen."""
PIXELS = {"shortest_edge": SIDE**2 - 1000, "longest_edge": SIDE**2 + 1000}
"""Bounds of a picture and of a frame: a square one has 64 rows, whatever its size. Room on both sides keeps the rounding
of a root from deciding."""


def build_config(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLConfig:
    """The model's configuration for a tokenizer."""
    mark: Any = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 384,
        "num_hidden_layers": DECODER_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        # Qwen's heads of 128 have frequencies that hardly turn over a text at a base of 1e6; these of 32 at 1e9.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9, "mrope_section": [4, 6, 6]},
        "initializer_range": 0.06,  # near width ** -0.5; 0.02 is for 2048
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    return Qwen2_5_VLConfig(
        vision_config=tower_config().to_dict(),  # pyright: ignore[reportArgumentType]
        text_config=text,  # pyright: ignore[reportArgumentType]
        image_token_id=mark(IMAGE),
        video_token_id=mark(VIDEO),
        vision_start_token_id=mark("<|vision_start|>"),
        vision_end_token_id=mark("<|vision_end|>"),
        tie_word_embeddings=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly initialised model, fp32, the same for the same seed."""
    torch.manual_seed(seed)
    return Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))


def build_processor() -> Qwen2VLImageProcessorPil:
    """Bicubic resize that keeps the ratio, CLIP's mean and deviation."""
    return Qwen2VLImageProcessorPil(size=dict(PIXELS), image_mean=list(MEAN), image_std=list(STD))


def video_settings() -> dict[str, Any]:
    """``video_preprocessor_config.json``: frames as pictures, at the rate of the films. The class that would write it needs
    torchvision."""
    return {
        "video_processor_type": "Qwen2VLVideoProcessor",
        "size": PIXELS,
        "resample": 3,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "image_mean": list(MEAN),
        "image_std": list(STD),
        "patch_size": GRID.patch_size,
        "merge_size": GRID.merge_size,
        "temporal_patch_size": GRID.temporal_patch_size,
        "do_sample_frames": True,
        "fps": RATE,
        "min_frames": min(FRAMES),
        "max_frames": max(FRAMES),
    }


def save_bundle(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_new_tokens: int,
) -> None:
    """Writes the Hugging Face folder with fp16 weights; every file is replaced atomically.

    `max_new_tokens`: what ``generation_config.json`` allows an answer.
    """
    with half_in(
        folder,
        model,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=max_new_tokens,
    ) as scratch:
        build_processor().save_pretrained(scratch)
        (scratch / "video_preprocessor_config.json").write_text(json.dumps(video_settings(), indent=2) + "\n")
        tokenizer.save_pretrained(scratch)
