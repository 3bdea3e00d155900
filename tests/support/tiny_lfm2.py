"""Tiny random LFM2 and LFM2-VL: see `tiny_models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from tests.support import tiny_models
from tests.support.tiny_models import token_id

CONV, FULL = "conv", "full_attention"

IMAGE_TOKENS = ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
SPECIAL = (
    "<|startoftext|>", "<|im_start|>", "<|im_end|>", *IMAGE_TOKENS,
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)), "<image>",
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""After that of the published LFM2-VL."""
PROCESSOR = {
    "image_processor_type": "Lfm2VlImageProcessorFast", "do_image_splitting": True, "downsample_factor": 2,
    "encoder_patch_size": 8, "tile_size": 32, "min_tiles": 2, "max_tiles": 4, "use_thumbnail": True,
    "min_image_tokens": 2, "max_image_tokens": 6, "max_pixels_tolerance": 2.0, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "rescale_factor": 1 / 255, "resample": 2,
}  # fmt: skip
"""A tile has 4 embeddings, and a picture that is not cut 2 to 6."""


def text_config(tokenizer: PreTrainedTokenizerFast, **changes: Any) -> Lfm2Config:
    """A convolution in every second layer, from the first on; 2 layers unless changed."""
    layers = changes.get("num_hidden_layers", 2)
    options: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 512, "block_multiple_of": 16,
        "layer_types": [(CONV, FULL)[i % 2] for i in range(layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": token_id(tokenizer, "<|im_start|>"), "eos_token_id": token_id(tokenizer, "<|im_end|>"),
        "pad_token_id": None,
    } | changes  # fmt: skip
    return Lfm2Config(**options)


def lfm2(seed: int = 20, **changes: Any) -> tuple[Lfm2ForCausalLM, PreTrainedTokenizerFast]:
    """An LFM2 that reads text; tied, as the published ones are."""
    tokenizer = tiny_models.llama_tokenizer()
    config = text_config(tokenizer, **changes)
    model = Lfm2ForCausalLM(config).eval()
    silent = tiny_models.token_ids(config.bos_token_id, config.eos_token_id)
    tiny_models.fill(model, silent, torch.Generator().manual_seed(seed))
    return model, tokenizer


def vl_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's, with `SPECIAL` behind its words; `<|im_end|>` ends a sequence."""
    core = tiny_models._byte_level(list(SPECIAL))
    names = dict(
        zip(("image_start_token", "image_end_token", "image_thumbnail_token"), IMAGE_TOKENS, strict=True)
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|startoftext|>", eos_token="<|im_end|>",
        extra_special_tokens={**names, "image_token": "<image>"}, chat_template=TEMPLATE,
    )  # fmt: skip


def lfm2_vl(
    seed: int = 31, *, vision_layers: int = 2, vision_width: int = 48, table_side: int = 3, normed: bool = True,
    tied: bool = True, image: dict[str, Any] | None = None, **changes: Any,
) -> tuple[Lfm2VlForConditionalGeneration, PreTrainedTokenizerFast]:  # fmt: skip
    """An LFM2-VL of SigLIP 2 and LFM2 (2 layers unless changed); `image` changes its processor's settings, and `normed` says
    whether its projector begins with a norm."""
    tokenizer = vl_tokenizer()
    settings = PROCESSOR | (image or {})
    text = text_config(
        tokenizer, tie_word_embeddings=tied, bos_token_id=token_id(tokenizer, "<|startoftext|>"), **changes
    )
    config = Lfm2VlConfig(
        vision_config={
            "model_type": "siglip2_vision_model", "hidden_size": vision_width, "intermediate_size": 2 * vision_width,
            "num_hidden_layers": vision_layers, "num_attention_heads": 3, "num_patches": table_side**2,
            "patch_size": settings["encoder_patch_size"], "vision_use_head": False,
        },
        text_config=text.to_dict(), image_token_id=token_id(tokenizer, "<image>"), projector_hidden_size=64,
        projector_use_layernorm=normed, downsample_factor=settings["downsample_factor"], tie_word_embeddings=tied,
    )  # fmt: skip
    model: Any = Lfm2VlForConditionalGeneration(config).eval()
    model.image_settings = settings
    silent = tuple(token_id(tokenizer, token) for token in SPECIAL)
    tiny_models.fill(model, silent, torch.Generator().manual_seed(seed))
    return model, tokenizer


def save_processor(model: Any, tokenizer: Any, folder: Path) -> None:
    """The files of a processor, which itself needs torchvision."""
    settings = getattr(model, "image_settings", PROCESSOR)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Lfm2VlProcessor"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save_pretrained(folder)


def fill(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Draws the weights; see `tiny_models.fill`. Convolutions weigh each of their tokens alike, so that a row which is not
    the right one shows."""
    body: Any = getattr(model.model, "language_model", model.model)
    gains = {"conv.in_proj": 1.6, "conv.out_proj": 2.5, "v_proj": 1.5, "self_attn.out_proj": 2.0, "w2": 3.0}
    tiny_models._scale_linears(body, gains, generator)
    for name, module in body.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            tiny_models._normal(module.weight, 0.7, generator)
            if module.bias is not None:
                tiny_models._normal(module.bias, 0.3, generator)
        elif type(module).__name__ == "Lfm2RMSNorm":
            sharp = 1.6 if name.endswith(("q_layernorm", "k_layernorm")) else 1.0
            module.weight.data.normal_(sharp, 0.1, generator=generator)
    config = model.config.get_text_config()
    head = tiny_models._head(config.vocab_size, config.hidden_size, silent, generator)
    head[0] *= 1.8
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
        if model.lm_head.weight is body.embed_tokens.weight:
            # The row of the current token scores itself: without a final norm that turns signs it would repeat for ever.
            signs = torch.randint(0, 2, (config.hidden_size,), generator=generator) * 2.0 - 1.0
            body.embedding_norm.weight.mul_(signs)
        else:
            tiny_models._normal(body.embed_tokens.weight, 0.7, generator)
    if body is not model.model:
        _fill_tower(model.model, generator)


def _fill_tower(model: Any, generator: torch.Generator) -> None:
    tower, projector = model.vision_tower, model.multi_modal_projector
    for part in (tower, projector):
        tiny_models._scale_linears(part, {"q_proj": 1.6, "k_proj": 1.6, "linear_2": 2.0}, generator)
        tiny_models._fill_norms(part, generator)
    tiny_models._normal(tower.embeddings.position_embedding.weight, 0.6, generator)
