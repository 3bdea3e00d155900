"""Architecture of ``tiny-vit-gpt2``: the classes of ViT-GPT2 at 4 million parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    PreTrainedTokenizerBase,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessorPil,
)

from ..common.folder import half_in

SIDE = 96  # pixels
PATCH = 12
ROWS = (SIDE // PATCH) ** 2 + 1  # the class token's and the patches'
WIDTH = 128
DECODER_LAYERS = 12
POSITIONS = 512  # what a build allows by default; captions need 160
MEAN = STD = (0.5, 0.5, 0.5)
FROZEN = ("encoder.",)
"""Names of the image tower begin with this; the decoder is trained with it frozen."""


def build_config(tokenizer: PreTrainedTokenizerBase) -> VisionEncoderDecoderConfig:
    """The model's configuration for a tokenizer; the tower is that of ``tiny-blip2-flant5``."""
    end: Any = tokenizer.eos_token_id
    vision = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        hidden_act="gelu",
        layer_norm_eps=1e-6,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=POSITIONS,
        n_embd=WIDTH,
        n_layer=DECODER_LAYERS,
        n_head=4,
        n_inner=384,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.06,  # near width ** -0.5; GPT-2's 0.02 is for 768
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    config: Any = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        vision, text, decoder_start_token_id=end, bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    return config


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> VisionEncoderDecoderModel:
    """A freshly initialised model, fp32, the same for the same seed."""
    torch.manual_seed(seed)
    return VisionEncoderDecoderModel(build_config(tokenizer))


def build_processor() -> ViTImageProcessorPil:
    """Bicubic resize to the input size, as the training pictures have it; ViT's mean and deviation."""
    return ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, resample=3, image_mean=list(MEAN), image_std=list(STD)
    )


def save_bundle(
    model: VisionEncoderDecoderModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    max_new_tokens: int,
) -> None:
    """Writes the Hugging Face folder with fp16 weights; every file is replaced atomically.

    `max_new_tokens`: what ``generation_config.json`` allows a caption.
    """
    end = tokenizer.eos_token_id
    with half_in(
        folder,
        model,
        decoder_start_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_new_tokens=max_new_tokens,
    ) as scratch:
        build_processor().save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
