"""Image captioning with a ViT encoder and a GPT-2 decoder that attends to every hidden state of it (VisionEncoderDecoderModel)."""

from __future__ import annotations

from typing import Any, ClassVar

from ...runtime.common.errors import InputError, UnsupportedModelError
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.parts import ReferencePrompt
from .languages.gpt2 import GPT2Language
from .vision.vit import ViTVision


class ViTGPT2Family(Family):
    """Exports a VisionEncoderDecoderModel of ViT and GPT-2. A prompt is the beginning of the caption."""

    name: ClassVar[str] = "vit-gpt2"
    architectures: ClassVar[tuple[str, ...]] = ("VisionEncoderDecoderModel",)
    model_types: ClassVar[tuple[str, ...]] = ("vision-encoder-decoder",)
    needs_picture: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        kinds = (self.config.encoder.model_type, self.config.decoder.model_type)
        if kinds != ("vit", "gpt2"):
            raise UnsupportedModelError(
                f"VisionEncoderDecoderModel of {kinds[0]!r} and {kinds[1]!r} is not supported, only of 'vit' and 'gpt2'"
            )
        self.language = GPT2Language(checkpoint, self.config.decoder, "decoder.")
        self.vision = ViTVision(checkpoint, self.language.decoder.hidden_size)

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """The picture through the model's image processor; the caption starts with the prompt's tokens."""
        if image is None:
            raise InputError("this model describes images: give one")
        pixels = self.checkpoint.image_processor(images=image, return_tensors="pt")["pixel_values"]
        words = self.checkpoint.tokenizer(prompt or "", add_special_tokens=False)["input_ids"]
        return ReferencePrompt((), {"pixel_values": pixels}, (self.decoder_start or 0, *words))
