"""A tiny random SmolVLM and Idefics 3; see `tiny_models`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
)

from tests.support import tiny_models

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    "<image>",
)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""After that of the published SmolVLM: pictures where they stand, and no branch for videos."""
KINDS: dict[str, tuple[Any, Any, Any]] = {
    "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMImageProcessorPil),
    "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration, Idefics3ImageProcessorPil),
}
MERGES = [
    ("Ċ", "Ċ"), ("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("r", "e"), ("re", "d"), ("Ġ", "a"), ("i", "n"), ("o", "n"),
    ("Ġ", "f"), ("r", "a"), ("m", "e"), ("ra", "me"), ("Ċ", "F"), ("0", "0"), ("Ġ", "0"), ("Ġ0", "0"),
]  # fmt: skip
"""Two line ends are one token, and a time's first digits with the blank before them another than without."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, then `SPECIAL`; `<|im_end|>` ends a sequence."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in MERGES:
        vocabulary["".join(pair)] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|im_start|>")


def smolvlm(
    seed: int = 31, *, kind: str = "smolvlm", image_side: int = 32, patch_size: int = 8, scale_factor: int = 2,
    longest: int = 64, split: bool = True, vision_layers: int = 2, vision_width: int = 64, tied: bool = False,
    **text_changes: Any,
) -> tuple[Any, PreTrainedTokenizerFast]:  # fmt: skip
    """A SmolVLM of SigLIP and Llama (2 layers unless changed); a tile has 2 × 2 rows unless changed, and a picture is resized
    to a `longest` side."""
    core = tokenizer()
    text = tiny_models.llama_config(core, tied=tied, **text_changes)
    config_kind, model_kind, _ = KINDS[kind]
    config = config_kind(
        vision_config={
            "hidden_size": vision_width, "intermediate_size": 2 * vision_width, "num_hidden_layers": vision_layers,
            "num_attention_heads": 2, "image_size": image_side, "patch_size": patch_size,
        },
        text_config=text.to_dict(), scale_factor=scale_factor, image_token_id=len(core) - 1, tie_word_embeddings=tied,
        pad_token_id=text.eos_token_id,
    )  # fmt: skip
    config.tiling = {"longest": longest, "split": split}
    model = model_kind(config).eval()
    silent = tuple(tiny_models.token_id(core, token) for token in SPECIAL)
    tiny_models.fill(model, silent, torch.Generator().manual_seed(seed))
    return model, core


def fill(model: Any, silent: tuple[int, ...], generator: torch.Generator) -> None:
    """Draws the weights; see `tiny_models.fill`."""
    tower = model.model.vision_model
    tiny_models._scale_linears(tower, {}, generator)
    tiny_models._scale_linears(model.model.connector, {}, generator)
    tiny_models._fill_norms(tower, generator)
    tiny_models._normal(tower.embeddings.position_embedding.weight, 0.3, generator)
    patches = tower.embeddings.patch_embedding
    tiny_models._normal(patches.weight, patches.weight[0].numel() ** -0.5, generator)
    tiny_models.FILLS[tiny_models.LlamaForCausalLM](model, silent, generator)


def save_processor(model: Any, core: Any, folder: Path) -> None:
    """The files of a processor, which itself needs torchvision and num2words."""
    config = model.config
    side, tiling = config.vision_config.image_size, getattr(config, "tiling", {"longest": 64, "split": True})
    KINDS[config.model_type][2](
        size={"longest_edge": tiling["longest"]},
        max_image_size={"longest_edge": side},
        do_image_splitting=tiling["split"],
    ).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    if config.model_type == "smolvlm":
        settings["video_sampling"] = {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": side}}
    path.write_text(json.dumps(settings))
    rows = (side // config.vision_config.patch_size // config.scale_factor) ** 2
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": rows}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    core.save_pretrained(folder)
