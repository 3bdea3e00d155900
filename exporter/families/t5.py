"""T5, text to text (T5ForConditionalGeneration)."""

from __future__ import annotations

from typing import Any, ClassVar

from ...runtime.common.errors import InputError
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.parts import ReferencePrompt
from .languages.t5 import T5Language


class T5Family(Family):
    """Exports a plain T5ForConditionalGeneration."""

    name: ClassVar[str] = "t5"
    architectures: ClassVar[tuple[str, ...]] = ("T5ForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("t5",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = T5Language(checkpoint, checkpoint.config, "")

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """The tokenizer's ids with its `</s>` go to the encoder."""
        if image is not None:
            raise InputError("this model reads text only: leave the image out")
        ids = self.checkpoint.tokenizer(prompt)["input_ids"]
        return ReferencePrompt(tuple(ids), None, (self.decoder_start or 0,))
