"""Architecture of ``smollm2-llava``: LLaVA-1.5's classes around a Llama that is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

from ..common.folder import half_in
from .tokenizer import IMAGE, TEMPLATE

SIDE = 96  # pixels
PATCH = 16
ROWS = (SIDE // PATCH) ** 2  # the patches'; the class token's is not read
WIDTH = 256
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


def build_model(
    language: Path, tokenizer: PreTrainedTokenizerBase, seed: int
) -> LlavaForConditionalGeneration:
    """A fresh tower and projector, the same for the same seed, before the Llama of a folder; fp32."""
    llama = LlamaForCausalLM.from_pretrained(language, dtype=torch.float32)
    torch.manual_seed(seed)
    llama.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    vision = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        hidden_act="gelu",
        image_size=SIDE,
        patch_size=PATCH,
    )
    mark: Any = tokenizer.convert_tokens_to_ids(IMAGE)
    tied: Any = llama.config.tie_word_embeddings
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama.config,
        image_token_index=mark,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=tied,
    )
    model = LlavaForConditionalGeneration(config)
    parts: Any = model
    parts.model.language_model.load_state_dict(llama.model.state_dict())
    parts.lm_head.load_state_dict(llama.lm_head.state_dict())
    return model


def frozen(model: LlavaForConditionalGeneration, tuned: int) -> tuple[str, ...]:
    """What names of parameters begin with that do not learn: all but so many last layers, the norm, an untied head and, where every
    layer learns, the projector. What stands before all that learns has no gradient."""
    language = "model.language_model."
    config: Any = model.config
    before = range(config.text_config.num_hidden_layers - tuned)
    return (
        "model.vision_tower.",
        f"{language}embed_tokens.",
        *(("model.multi_modal_projector.",) if before else ()),
        *(f"{language}layers.{i}." for i in before),
    )


def build_processor(tokenizer: PreTrainedTokenizerBase) -> LlavaProcessor:
    """CLIP's resize, mean and deviation; square pictures are not cropped."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=list(MEAN),
        image_std=list(STD),
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
    )


def save_bundle(
    model: LlavaForConditionalGeneration,
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
        build_processor(tokenizer).save_pretrained(scratch)
