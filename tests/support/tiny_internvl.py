"""A small random InternVL: InternViT and a Qwen2, Qwen3 or Llama; `tiny_models.BUILDERS` names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from tests.support import tiny_models

LANGUAGES: dict[str, Any] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}

MARKS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% elif part['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""After that of the published InternVL3."""


def internvl(
    seed: int = 40, *, language: str = "qwen2", image_side: int = 32, patch_size: int = 8, vision_layers: int = 3,
    vision: dict[str, Any] | None = None, feature_layer: int = -1, downsample_ratio: float = 0.5, tied: bool = False,
    max_patches: int = 12, **text_changes: Any,
) -> tuple[InternVLForConditionalGeneration, PreTrainedTokenizerFast]:  # fmt: skip
    """An InternVL (2 layers unless changed); a tile has 2 × 2 rows unless changed. `vision` changes its tower, and
    `max_patches` is the processor's."""
    tokenizer = tiny_models.llama_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|endoftext|>"})
    added = [AddedToken(mark, normalized=False, special=True) for mark in MARKS.values()]
    tokenizer.add_tokens(added, special_tokens=True)  # type: ignore[arg-type]
    tokenizer.chat_template = None  # it is the processor's
    end = tiny_models.token_id(tokenizer, "<|im_end|>")
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": tied,
        "bos_token_id": None, "eos_token_id": end, "pad_token_id": end + 1,
    } | ({"head_dim": 64} if language == "qwen3" else {}) | text_changes  # fmt: skip
    tower: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": vision_layers, "num_attention_heads": 2,
        "image_size": [image_side, image_side], "patch_size": [patch_size, patch_size],
    } | (vision or {})  # fmt: skip
    grid = image_side // patch_size
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**tower), text_config=LANGUAGES[language](**text),
        image_token_id=tiny_models.token_id(tokenizer, "<IMG_CONTEXT>"), tie_word_embeddings=tied,
        image_seq_length=round(grid * downsample_ratio) ** 2, downsample_ratio=downsample_ratio,
        vision_feature_layer=feature_layer,
    )  # fmt: skip
    model = InternVLForConditionalGeneration(config).eval()
    model.max_patches = max_patches  # type: ignore[assignment]
    silent = (end - 1, end, *range(end + 1, len(tokenizer)))
    tiny_models.fill(model, silent, torch.Generator().manual_seed(seed))
    return model, tokenizer


def fill(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Weights of its tower and projector, and of its language model as that is filled alone."""
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    gains = {"q_proj": 1.6, "k_proj": 1.6, "linear_1": 1.0, "linear_2": 1.0}
    for part in (tower, projector):
        tiny_models._scale_linears(part, gains, generator)
        tiny_models._fill_norms(part, generator)
    tiny_models._normal(tower.embeddings.cls_token, 0.3, generator)
    if tower.embeddings.position_embeddings is not None:
        tiny_models._normal(tower.embeddings.position_embeddings, 0.5, generator)
    patches = tower.embeddings.patch_embeddings.projection
    tiny_models._normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)
    for name, value in tower.named_parameters():
        if "lambda" in name or name.endswith(("q_norm.weight", "k_norm.weight")):
            value.data.normal_(0.8, 0.3, generator=generator)
        elif type(tower.get_submodule(name.rpartition(".")[0])).__name__ == "InternVLVisionRMSNorm":
            value.data.normal_(1.0, 0.1, generator=generator)
    fills = {
        "llama": tiny_models.fill_llama,
        "qwen2": tiny_models._fill_qwen2,
        "qwen3": tiny_models._fill_qwen3,
    }
    fills[model.config.text_config.model_type](model, silent, generator)


def save_processors(model: Any, folder: Path) -> None:
    """As published: transformers' processor of the whole model needs torchvision, for videos."""
    height, width = model.config.vision_config.image_size
    GotOcr2ImageProcessorPil(
        size={"height": height, "width": width}, max_patches=getattr(model, "max_patches", 12),
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)  # fmt: skip
    said = {"processor_class": "InternVLProcessor", "image_seq_length": model.config.image_seq_length}
    (folder / "processor_config.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def name_marks(folder: Path) -> None:
    """What the saved tokenizer calls the tokens around a picture."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra_special_tokens": MARKS} | MARKS))
