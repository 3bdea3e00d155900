"""InternVL3 and InternVL3.5: pictures in tiles, anywhere in the prompt of a Qwen2, Qwen3 or Llama (Zhu et al., arXiv 2504.10479;
Wang et al., arXiv 2508.18265)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ...runtime.common.errors import InputError, UnsupportedModelError
from ...runtime.families.base import image_list
from ...runtime.families.internvl import Marks
from ...runtime.images.video import Video
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.config_checks import check_language_model
from .common.parts import ReferencePrompt
from .common.prompt_text import marked_text, replaced_marks, tokenized
from .languages import language_class
from .vision.internvit import InternViTVision

LANGUAGES = ("llama", "qwen2", "qwen3")
"""What the published checkpoints that this family exports read tiles with; others (gpt_oss, qwen3_moe) are refused."""


class InternVLFamily(Family):
    """Exports InternVLForConditionalGeneration."""

    name: ClassVar[str] = "internvl"
    architectures: ClassVar[tuple[str, ...]] = ("InternVLForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("internvl",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = self.config.text_config
        check_language_model(config, checkpoint.architecture, LANGUAGES)
        self.language = language_class(config.model_type)(checkpoint, config, "", "model.language_model.")
        self.vision: InternViTVision = InternViTVision(checkpoint, self.language.decoder.hidden_size)

    @property
    def image_token_id(self) -> int:
        """`<IMG_CONTEXT>`."""
        return self.config.image_token_id

    @property
    def marks(self) -> Marks:
        """What the tokenizer calls the tokens around a picture. Raises UnsupportedModelError for one that names none, which
        transformers' processor does not take either."""
        tokenizer = self.checkpoint.tokenizer
        names = ("context_image_token", "start_image_token", "end_image_token")
        found: dict[str, str] = {}
        for name in names:
            found[name] = token = getattr(tokenizer, name, None)  # type: ignore[assignment]
            if not isinstance(token, str):
                raise UnsupportedModelError(
                    f"{self.checkpoint.folder}: its tokenizer has no {name}; take tokenizer_config.json from the checkpoint's "
                    "current release, whose extra_special_tokens name it"
                )
        if tokenizer.convert_tokens_to_ids(found["context_image_token"]) != self.image_token_id:
            raise UnsupportedModelError(
                f"{self.checkpoint.folder}: image_token_id={self.image_token_id} is not the tokenizer's context_image_token "
                f"{found['context_image_token']!r:.40}; correct config.json"
            )
        return Marks(*found.values())

    def image(self) -> dict[str, Any]:
        """See `Family`; with the tokens around a picture."""
        marks = self.marks
        around = {"start_image_token": marks.start, "end_image_token": marks.end}
        return self.vision.settings() | around

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """As `InternVLProcessor`, which needs torchvision for the videos that it reads too: the image processor, asked for
        tiles; the chat template; `<img>`, `<IMG_CONTEXT>` for every embedding and `</img>` in place of a picture's mark."""
        images = image_list(image)
        if any(isinstance(each, Video) for each in images):
            raise InputError("this model reads pictures, no videos: give frames of it as pictures")
        marks = self.marks
        text, surrounded = marked_text(self, prompt, ["image"] * len(images), marks.media)
        if not images:
            return ReferencePrompt(tuple(tokenized(self, text, surrounded)))
        tensors, tiles = self._tiles(images)
        each = self.vision.image_seq_length
        pictures = [f"{marks.start}{marks.context * each * count}{marks.end}" for count in tiles]
        text = replaced_marks(text, {marks.context: pictures})
        return ReferencePrompt(tuple(tokenized(self, text, surrounded)), tensors)

    def _tiles(self, images: Sequence[Any]) -> tuple[dict[str, torch.Tensor], list[int]]:
        """(`pixel_values` of all tiles of all pictures; how many each has)."""
        tiling = self.vision.tiling
        made = self.checkpoint.image_processor(
            images=list(images), crop_to_patches=True, min_patches=tiling.min_tiles, max_patches=tiling.max_tiles,
            return_tensors="pt",
        )  # fmt: skip
        return {"pixel_values": made["pixel_values"]}, made["num_patches"].tolist()
