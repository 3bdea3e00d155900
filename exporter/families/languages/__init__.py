"""Language models: shape, tensors and graphs of a decoder (and a text encoder), reused by every family. One file each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from .base import Language

LANGUAGES = {
    "t5": "T5Language",
    "llama": "LlamaLanguage",
    "qwen2": "Qwen2Language",
    "qwen3": "Qwen3Language",
    "qwen2_vl_text": "Qwen2VLLanguage",
    "qwen2_5_vl_text": "Qwen2_5_VLLanguage",
    "qwen3_vl_text": "Qwen3VLLanguage",
    "qwen3_5_text": "Qwen3_5Language",
    "gemma": "GemmaLanguage",
    "gemma2": "Gemma2Language",
    "gemma3_text": "Gemma3Language",
    "lfm2": "Lfm2Language",
    "opt": "OPTLanguage",
    "gpt2": "GPT2Language",
}
"""`model_type` of a language model's configuration → class in the module of the same name. A new one is one line here."""


def language_for(checkpoint: Checkpoint, config: Any, prefix: str) -> Language:
    """The language model of `config`, found at the module path `prefix` ("" or "language_model.") of the whole model."""
    kind = config.model_type
    if kind not in LANGUAGES:
        raise UnsupportedModelError(
            f"{checkpoint.architecture} with the language model {kind!r} is not supported, only {', '.join(LANGUAGES)}"
        )
    return language_class(kind)(checkpoint, config, prefix)


def language_class(name: str) -> type[Language]:
    """The class of a language model by its name in `LANGUAGES`."""
    return getattr(import_module(f".{name}", __name__), LANGUAGES[name])


__all__ = ["LANGUAGES", "Language", "language_class", "language_for"]
