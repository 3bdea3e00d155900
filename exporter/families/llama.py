"""Decoders that read text only: Llama, Qwen2 and Qwen2.5 with biases, Qwen3 with norms of queries and keys, Gemma 3 with
windows, LFM2 with convolutions."""

from __future__ import annotations

from typing import Any, ClassVar

from ...runtime.common.errors import InputError
from ...runtime.text.messages import check_messages, readable
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.parts import ReferencePrompt
from .languages import language_for


class LlamaFamily(Family):
    """Exports LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM and Lfm2ForCausalLM: the layout of a
    prompt is the same, whatever decoder reads it."""

    name: ClassVar[str] = "llama"
    architectures: ClassVar[tuple[str, ...]] = (
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
        "Lfm2ForCausalLM",
    )
    model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen2", "qwen3", "gemma3_text", "lfm2")

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = language_for(checkpoint, checkpoint.config, "")

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """The chat template where the tokenizer has one (text becomes one user message), else the plain prompt."""
        if image is not None:
            raise InputError("this model reads text only: leave the image out")
        tokenizer = self.checkpoint.tokenizer
        if getattr(tokenizer, "chat_template", None):
            template = tokenizer.get_chat_template()  # of several, the default
            asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            turns = readable(template, check_messages(asked), tokenizer.special_tokens_map)
            text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(prompt)["input_ids"]
        if not ids:
            raise InputError("the prompt has no tokens; write some text")
        return ReferencePrompt(tuple(ids))
