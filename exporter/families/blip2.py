"""BLIP-2: image embeddings in front of the prompt of a language model (Li et al., arXiv 2301.12597).

The vision tower is the same for every language model; T5 reads the embeddings with its encoder, a decoder-only model itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ...runtime.common.errors import UnsupportedModelError
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.parts import ReferencePrompt
from .languages import language_for
from .vision.blip import BlipVision


class Blip2Family(Family):
    """Exports Blip2ForConditionalGeneration."""

    name: ClassVar[str] = "blip2"
    architectures: ClassVar[tuple[str, ...]] = ("Blip2ForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("blip-2",)
    needs_picture: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = language_for(checkpoint, self.config.text_config, "language_model.")
        if not self.language.reads_image_embeds:
            raise UnsupportedModelError(
                f"Blip2ForConditionalGeneration with the language model {self.language.name!r} is not supported"
            )
        self.vision = BlipVision(checkpoint, self.language.decoder.hidden_size)
        if self.config.image_token_index is None:
            raise UnsupportedModelError(
                "Blip2ForConditionalGeneration: image_token_index is not set; save the model with a current processor"
            )

    @property
    def image_token_id(self) -> int:
        """The processor's `<image>`."""
        return self.config.image_token_index

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """`Blip2Processor`: image tokens, then the prompt with the tokenizer's special tokens."""
        processor = self.checkpoint.processor
        if processor.num_query_tokens is None:  # folders of older releases leave it to the configuration
            processor.num_query_tokens = self.config.num_query_tokens
        made = processor(images=image, text=prompt or "", return_tensors="pt")
        start = None if self.decoder_start is None else (self.decoder_start,)
        ids = tuple(made["input_ids"][0].tolist())
        return ReferencePrompt(ids, {"pixel_values": made["pixel_values"]}, start)
