"""Llama, text only (LlamaForCausalLM)."""

from __future__ import annotations

from typing import Any, ClassVar

from ...runtime.errors import InputError
from ..checkpoint.load import Checkpoint
from .base import Family, ReferencePrompt
from .languages.llama import LlamaLanguage


class LlamaFamily(Family):
    """Exports LlamaForCausalLM."""

    name: ClassVar[str] = "llama"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = LlamaLanguage(checkpoint, checkpoint.config, "")

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """The chat template where the tokenizer has one (text becomes one user message), else the plain prompt."""
        if image is not None:
            raise InputError("this model reads text only: leave the image out")
        tokenizer = self.checkpoint.tokenizer
        if getattr(tokenizer, "chat_template", None):
            turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        if not ids:
            raise InputError("the prompt has no tokens; write some text")
        return ReferencePrompt(tuple(ids))
