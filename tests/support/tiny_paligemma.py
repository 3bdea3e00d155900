"""Tiny random PaliGemmas, of Gemma and of Gemma 2: see `tiny_models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from vlmexport.exporter.families.paligemma import MARKS

from tests.support import tiny_models
from tests.support.tiny_gemma import fill_siglip, fill_tables, normal, scale_linears
from tests.support.tiny_models import fill, token_id

GAINS = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 1.5}
"""Makes attention sharp, so that a cap of its scores shows."""
ALONE = {"o_proj": 5.0, "down_proj": 8.0}
"""What else Gemma's linear layers are scaled by: no norm stands behind attention and MLP."""
NORMS = {"post_attention_layernorm": 4.0, "post_feedforward_layernorm": 3.0}
"""What those of Gemma 2 scale by, against a token's own embedding."""


def paligemma_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's with the tokens of places and of segments, then that of a picture, as those of the published ones."""
    made = tiny_models.llama_tokenizer([("Ċ", "Ċ")])
    made.add_special_tokens({"pad_token": "<pad>"})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
    )
    tokenizer.add_tokens(MARKS[1:])
    PaliGemmaProcessor(SiglipImageProcessorPil(image_seq_length=1), tokenizer)  # adds the picture's
    return tokenizer


def paligemma(
    seed: int = 30, language: str = "gemma2", vision_layers: int = 1, image_side: int = 16, patch_size: int = 4,
    tied: bool = True, **changes: Any,
) -> tuple[PaliGemmaForConditionalGeneration, PreTrainedTokenizerFast]:  # fmt: skip
    """One of SigLIP and `language`; with Gemma 2 windows of 8, which a prompt does not fit, and caps that show."""
    tokenizer = paligemma_tokenizer()
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "bos_token_id": token_id(tokenizer, "<|im_start|>"), "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": token_id(tokenizer, "<pad>"), "tie_word_embeddings": tied,
    }  # fmt: skip
    if language == "gemma2":
        options |= {
            "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
        }  # fmt: skip
    text = {"gemma": GemmaConfig, "gemma2": Gemma2Config}[language](**(options | changes))
    vision = SiglipVisionConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=vision_layers, num_attention_heads=3,
        image_size=image_side, patch_size=patch_size, vision_use_head=False,
    )  # fmt: skip
    tokens: dict[str, Any] = {
        name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = PaliGemmaConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=text.hidden_size,
        hidden_size=text.hidden_size, vocab_size=text.vocab_size, tie_word_embeddings=tied,
        image_token_index=token_id(tokenizer, "<image>"), **tokens,
    )  # fmt: skip
    model = PaliGemmaForConditionalGeneration(config).eval()
    silent = tuple(token_id(tokenizer, name) for name in ("<|im_start|>", "<|im_end|>", "<pad>", "<image>"))
    fill(model, silent, torch.Generator().manual_seed(seed))
    return model, tokenizer


def save_processor(model: Any, tokenizer: Any, folder: Path) -> None:
    """Writes the processor beside the model."""
    side, patch = model.config.vision_config.image_size, model.config.vision_config.patch_size
    images = SiglipImageProcessorPil(
        size={"height": side, "width": side},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        image_seq_length=(side // patch) ** 2,
    )
    PaliGemmaProcessor(images, tokenizer).save_pretrained(folder)


def fill_paligemma(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Norms scale by 1 and their weight."""
    body = model.model.language_model
    scale_linears(body, generator)
    four_norms = hasattr(body.layers[0], "post_feedforward_layernorm")
    gains = GAINS if four_norms else GAINS | ALONE
    for name, module in body.named_modules():
        kind = name.rpartition(".")[2]
        if type(module).__name__.endswith("RMSNorm"):
            gain = NORMS.get(kind, 1.0) if four_norms else 1.0
            module.weight.data.normal_(gain - 1.0, 0.1, generator=generator)
        elif kind in gains:
            module.weight.data.mul_(gains[kind])
    fill_tables(model, body, silent, generator)
    fill_siglip(model.model.vision_tower, generator)
    weight = model.model.multi_modal_projector.linear.weight
    normal(weight, 3.0 * weight.shape[1] ** -0.5, generator)
