"""Tiny random Gemmas: see `tiny_models`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)

from tests.support import tiny_models
from tests.support.tiny_models import LOGIT_STD, fill, token_id

TEMPLATE = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set before = messages[0]['content'] if messages[0]['content'] "
    "is string else messages[0]['content'][0]['text'] %}{% set turns = messages[1:] %}{% else %}{% set before = '' %}"
    "{% set turns = messages %}{% endif %}{% for message in turns %}"
    "{{ '<|im_start|>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if loop.first and before %}{{ before + '\n\n' }}{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}{% elif part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
"""After that of the published Gemma 3: what the system says stands in the user's first turn."""


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's with two line ends as one token, and the tokens of a picture."""
    made = tiny_models.llama_tokenizer([("Ċ", "Ċ")])
    made.add_special_tokens({"pad_token": "<pad>"})
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    made.add_special_tokens({"additional_special_tokens": list(names.values())})
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<pad>",
        extra_special_tokens=names, chat_template=TEMPLATE,
    )  # fmt: skip


def text_config(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Gemma3TextConfig:
    """Windows of 8 in every second layer, from the first on; 2 layers unless changed."""
    layers = changes.get("num_hidden_layers", 2)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 1024,
        "query_pre_attn_scalar": 24, "sliding_window": 8,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(layers)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0},
        },
        "bos_token_id": token_id(tokenizer, "<|im_start|>"), "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": token_id(tokenizer, "<pad>"),
    } | changes  # fmt: skip
    return Gemma3TextConfig(**options)


def silent(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """Special tokens, which lie behind the words."""
    return tuple(range(token_id(tokenizer, "<|im_start|>"), len(tokenizer)))


def gemma3_text(seed: int = 30, **changes: Any) -> tuple[Gemma3ForCausalLM, PreTrainedTokenizerFast]:
    """A Gemma 3 that reads text; tied, as the published ones are."""
    tokenizer = gemma_tokenizer()
    tokenizer.chat_template = tiny_models.CHAT_TEMPLATE
    model = Gemma3ForCausalLM(text_config(tokenizer, **changes)).eval()
    fill(model, silent(tokenizer), torch.Generator().manual_seed(seed))
    return model, tokenizer


def gemma3(
    seed: int = 30, vision_layers: int = 1, image_side: int = 32, patch_size: int = 4, rows: int = 16,
    tied: bool = True, **changes: Any,
) -> tuple[Gemma3ForConditionalGeneration, PreTrainedTokenizerFast]:  # fmt: skip
    """A Gemma 3 of SigLIP and windows of 8, which a picture of 16 `rows` does not fit."""
    tokenizer = gemma_tokenizer()
    text = text_config(tokenizer, tie_word_embeddings=tied, **changes)
    vision = SiglipVisionConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=vision_layers, num_attention_heads=3,
        image_size=image_side, patch_size=patch_size, vision_use_head=False,
    )  # fmt: skip
    config = Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=rows, tie_word_embeddings=tied,
        boi_token_index=token_id(tokenizer, "<start_of_image>"), eoi_token_index=token_id(tokenizer, "<end_of_image>"),
        image_token_index=token_id(tokenizer, "<image_soft_token>"),
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config).eval()
    fill(model, silent(tokenizer), torch.Generator().manual_seed(seed))
    return model, tokenizer


def save_processor(model: Gemma3ForConditionalGeneration, tokenizer: Any, folder: Path) -> None:
    """Writes the processor beside the model."""
    config: Any = model.config
    side = config.vision_config.image_size
    images = Gemma3ImageProcessorPil(
        size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    Gemma3Processor(
        images, tokenizer, chat_template=TEMPLATE, image_seq_length=config.mm_tokens_per_image
    ).save_pretrained(folder)


def normal(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    """Draws numbers of this size."""
    with torch.no_grad():
        weight.normal_(std=std, generator=generator)


def scale_linears(root: torch.nn.Module, generator: torch.Generator) -> None:
    """Linear layers whose output is as large as their input."""
    for module in root.modules():
        if isinstance(module, torch.nn.Linear):
            normal(module.weight, module.in_features**-0.5, generator)
            if module.bias is not None:
                normal(module.bias, 0.1, generator)


def fill_gemma3(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Norms scale by 1 and their weight. Those behind attention and MLP weigh these against a token's own embedding, those of
    queries and keys make attention sharp."""
    body: Any = getattr(model.model, "language_model", model.model)
    scale_linears(body, generator)
    gains = {"post_attention_layernorm": 4.0, "post_feedforward_layernorm": 3.0, "q_norm": 1.6, "k_norm": 1.6}
    for name, norm in body.named_modules():
        if type(norm).__name__ == "Gemma3RMSNorm":
            gain = gains.get(name.rpartition(".")[2], 1.0)
            norm.weight.data.normal_(gain - 1.0, 0.1, generator=generator)
    fill_tables(model, body, silent, generator)
    if body is not model.model:
        _fill_tower(model.model, generator)


def fill_tables(model: Any, body: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """The LM head and the embeddings of a Gemma, whose decoder is `body`; `silent` tokens are never said."""
    config = model.config.get_text_config()
    table = torch.empty(config.vocab_size, config.hidden_size)
    normal(table, LOGIT_STD / math.sqrt(config.hidden_size), generator)
    table[list(silent)] = 0.0
    table[0] *= 1.8
    with torch.no_grad():
        model.lm_head.weight.copy_(table)
        if model.lm_head.weight is body.embed_tokens.weight:
            # The row of the current token scores itself: without a final norm that turns signs it would repeat for ever.
            signs = torch.randint(0, 2, (config.hidden_size,), generator=generator) * 2.0 - 1.0
            body.norm.weight.copy_(signs * (1.0 + body.norm.weight) - 1.0)
        else:
            normal(body.embed_tokens.weight, 3.0 / math.sqrt(config.hidden_size), generator)


def fill_siglip(tower: Any, generator: torch.Generator) -> None:
    """A SigLIP whose pictures differ."""
    scale_linears(tower, generator)
    for module in tower.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data.normal_(1.0, 0.1, generator=generator)
    normal(tower.embeddings.position_embedding.weight, 0.3, generator)
    patches = tower.embeddings.patch_embedding
    normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)


def _fill_tower(model: Any, generator: torch.Generator) -> None:
    fill_siglip(model.vision_tower, generator)
    projector = model.multi_modal_projector
    projector.mm_soft_emb_norm.weight.data.normal_(0.0, 0.1, generator=generator)
    weight = projector.mm_input_projection_weight
    normal(weight, 3.0 * weight.shape[0] ** -0.5, generator)
