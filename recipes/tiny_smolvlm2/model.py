"""Architecture of ``tiny-smolvlm2``: the classes of SmolVLM2 at 3 million parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from ..common.folder import half_in
from .tiles import MEAN, PATCH, SCALE, SIDE, STD, TILE, TILE_ROWS
from .tokenizer import IMAGE

WIDTH = 128
DECODER_LAYERS = 12
POSITIONS = 2048
FROZEN = ("model.vision_model.", "model.connector.")
"""Names of the image side begin with one of these; the language model is trained with it frozen."""


def build_config(tokenizer: PreTrainedTokenizerBase) -> SmolVLMConfig:
    """The model's configuration for a tokenizer."""
    mark: Any = tokenizer.convert_tokens_to_ids
    vision = {
        "hidden_size": WIDTH,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "image_size": TILE,
        "patch_size": PATCH,
        "initializer_range": 0.06,  # near width ** -0.5; 0.02 is for 1152
    }
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 384,
        "num_hidden_layers": DECODER_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "initializer_range": 0.06,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": False,
    }
    return SmolVLMConfig(
        vision_config=vision,
        text_config=text,
        scale_factor=SCALE,
        image_token_id=mark(IMAGE),
        tie_word_embeddings=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> SmolVLMForConditionalGeneration:
    """A freshly initialised model, fp32, the same for the same seed."""
    torch.manual_seed(seed)
    return SmolVLMForConditionalGeneration(build_config(tokenizer))


def build_processor() -> SmolVLMImageProcessorPil:
    """Bicubic resize to three tiles across, SigLIP's mean and deviation. It samples no videos: in a tile of 32 pixels a frame shows
    little."""
    return SmolVLMImageProcessorPil(
        size={"longest_edge": SIDE},
        max_image_size={"longest_edge": TILE},
        do_image_splitting=True,
        resample=3,
        image_mean=list(MEAN),
        image_std=list(STD),
    )


def save_bundle(
    model: SmolVLMForConditionalGeneration,
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
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=max_new_tokens,
    ) as scratch:
        build_processor().save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        # The class of the processor needs torchvision and num2words.
        settings = {"image_seq_len": TILE_ROWS, "processor_class": "SmolVLMProcessor"}
        (scratch / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
