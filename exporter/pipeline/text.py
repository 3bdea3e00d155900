"""Tokenizer and special tokens of a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...runtime.common.errors import UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign
from ..checkpoint.checkpoint import Checkpoint
from ..families.common.base import Family
from .generation import generation_config

TOKENIZER_FILE = "tokenizer.json"


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes `tokenizer.json` as transformers loads it, without truncation and padding."""
    core_tokenizer(checkpoint).save(str(folder / TOKENIZER_FILE), pretty=False)


def core_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """A copy of the core of the tokenizer that transformers loads, without truncation and padding."""
    core = Tokenizer.from_str(checkpoint.tokenizer.backend_tokenizer.to_str())
    core.no_truncation()
    core.no_padding()
    return core


TEMPLATE_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "tokenizer_config.json",
)


def template_file(folder: Path, template: str) -> Path:
    """The file of a checkpoint that holds the chat template; the folder where none does by itself."""
    for name in TEMPLATE_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8")
            held = text if name.endswith(".jinja") else json.loads(text)["chat_template"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise_if_foreign(error)
            continue
        several = held if isinstance(held, list) else [{"template": held}]
        if any(isinstance(each, dict) and each.get("template") == template for each in several):
            return folder / name
    return folder


def end_tokens(checkpoint: Checkpoint, vocabulary: int | None = None) -> list[int]:
    """Tokens that end a text of the model, each below `vocabulary`. Raises UnsupportedModelError when there is none, or
    one that is no such token."""
    token = _special(checkpoint, "eos_token_id")
    ends = list(token) if isinstance(token, list | tuple) else [] if token is None else [token]
    if not all(type(end) is int for end in ends):
        raise UnsupportedModelError(f"{checkpoint.folder}: eos_token_id {token!r:.80} is not a token id")
    if not ends:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: no eos_token_id in the configuration; add it to generation_config.json"
        )
    beyond = [] if vocabulary is None else [end for end in ends if not 0 <= end < vocabulary]
    if beyond:
        own = checkpoint.generation_config.get("eos_token_id") == token
        file = checkpoint.folder / ("generation_config.json" if own else "config.json")
        raise UnsupportedModelError(
            f"{file}: eos_token_id {beyond[0]} is no token of the model, whose vocabulary has {vocabulary}; correct it"
        )
    return ends


def _special(checkpoint: Checkpoint, name: str) -> Any:
    # Where a generation_config.json is missing, transformers makes one of the configuration: the whole model's first.
    configs = (checkpoint.config, checkpoint.config.get_text_config(decoder=True))
    values = [getattr(source, name, None) for source in (generation_config(checkpoint), *configs)]
    return next((value for value in values if value is not None), None)


def _one_special(checkpoint: Checkpoint, name: str) -> int | None:
    token = _special(checkpoint, name)
    if token is not None and type(token) is not int:  # transformers' `generate` fails on it
        raise UnsupportedModelError(
            f"{checkpoint.folder}: {name} {token!r:.80} is not a token id; correct it"
        )
    return token


def describe_text(checkpoint: Checkpoint, family: Family, default_prompt: str | None) -> dict[str, Any]:
    """The manifest's `text`. Raises UnsupportedModelError when no token ends a text."""
    vocabulary = family.tensors()["embedding_table"].shape[0]
    ends = end_tokens(checkpoint, vocabulary)
    pad, bos = (_one_special(checkpoint, name) for name in ("pad_token_id", "bos_token_id"))
    _one_special(checkpoint, "decoder_start_token_id")  # `Family.decoder_start` finds it
    prompt = checkpoint.default_prompt if default_prompt is None else default_prompt
    return {
        "tokenizer": TOKENIZER_FILE,
        "vocab_size": vocabulary,
        "eos_token_ids": ends,
        "pad_token_id": pad if pad is not None and 0 <= pad < vocabulary else None,
        "bos_token_id": bos if bos is not None and 0 <= bos < vocabulary else None,
        "chat_template": family.chat_template,
        "default_prompt": prompt,
        "special_tokens": dict(checkpoint.tokenizer.special_tokens_map),
        **family.text(),
    }
