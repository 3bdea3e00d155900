"""LFM2-VL: pictures at nearly their own size, in tiles where they are large, anywhere in the prompt of an LFM2 (arXiv
2511.23404)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from transformers.image_utils import SizeDict
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    convert_image_to_patches,
    pad_along_first_dim,
)

from ...runtime.common.errors import InputError, UnsupportedModelError
from ...runtime.families.base import image_list
from ...runtime.families.lfm2_vl import TILE, Marks
from ...runtime.images.processors.resample import FILTERS
from ...runtime.images.video import Video
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.config_checks import check_language_model
from .common.parts import ReferencePrompt
from .common.prompt_text import marked_text, replaced_marks, tokenized
from .languages.lfm2 import Lfm2Language
from .vision.siglip2 import Siglip2Vision

KNOWN = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
"""What transformers' processor takes where the tokenizer names none."""


class Lfm2VLFamily(Family):
    """Exports Lfm2VlForConditionalGeneration of SigLIP 2 and LFM2."""

    name: ClassVar[str] = "lfm2-vl"
    architectures: ClassVar[tuple[str, ...]] = ("Lfm2VlForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("lfm2_vl",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = self.config.text_config
        check_language_model(config, checkpoint.architecture, ("lfm2",))
        self.language = Lfm2Language(checkpoint, config, "", "model.language_model.")
        self.vision: Siglip2Vision = Siglip2Vision(checkpoint, self.language.decoder.hidden_size)
        settings = self.checkpoint.processor_settings
        if settings.get("use_image_special_tokens") is False:
            raise UnsupportedModelError(
                f"{checkpoint.architecture}: use_image_special_tokens=false is not supported"
            )

    @property
    def image_token_id(self) -> int:
        """`<image>`."""
        return self.config.image_token_id

    @property
    def marks(self) -> Marks:
        """What the tokenizer calls the tokens of a picture. Raises UnsupportedModelError where one is no token, or `<image>`
        another than the model's."""
        tokenizer = self.checkpoint.tokenizer
        found = {name: getattr(tokenizer, name, None) or known for name, known in KNOWN.items()}
        ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in found.items()}
        for name, token in found.items():
            if ids[name] is None or ids[name] == tokenizer.unk_token_id:
                raise UnsupportedModelError(
                    f"{self.checkpoint.folder}: its tokenizer has no {name} {token!r:.80}; take tokenizer.json from the "
                    "checkpoint's current release"
                )
        if ids["image_token"] != self.image_token_id:
            raise UnsupportedModelError(
                f"{self.checkpoint.folder}: image_token_id={self.image_token_id} is not the tokenizer's "
                f"{found['image_token']!r:.40}; correct config.json"
            )
        return Marks(*found.values())

    def image(self) -> dict[str, Any]:
        """See `Family`; with the tokens of a picture."""
        marks = self.marks
        around = {
            "image_start_token": marks.start, "image_end_token": marks.end, "image_thumbnail_token": marks.thumbnail,
        }  # fmt: skip
        return self.vision.settings() | around

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """As `Lfm2VlProcessor`, whose image processor needs torchvision: its sizes and its text with the patches, the padding
        and the Pillow backend of `Siglip2ImageProcessorPil`."""
        images = image_list(image)
        if any(isinstance(each, Video) for each in images):
            raise InputError("this model reads pictures, no videos: give frames of it as pictures")
        marks = self.marks
        text, surrounded = marked_text(self, prompt, ["image"] * len(images), marks.media)
        if not images:
            return ReferencePrompt(tuple(tokenized(self, text, surrounded)))
        seen = [self._seen(np.asarray(each.convert("RGB")).transpose(2, 0, 1), marks) for each in images]
        text = replaced_marks(text, {marks.image: [words for words, _ in seen]})
        crops = [crop for _, own in seen for crop in own]
        vision = {name: torch.from_numpy(np.stack([crop[name] for crop in crops])) for name in crops[0]}
        return ReferencePrompt(tuple(tokenized(self, text, surrounded)), vision)

    def _seen(self, pixels: np.ndarray, marks: Marks) -> tuple[str, list[dict[str, np.ndarray]]]:
        """(text, tensors of each crop) of a picture uint8 [3, H, W]."""
        naflex = self.vision.naflex
        size, side = pixels.shape[1:], naflex.tile_size
        (down, across), whole = naflex.grid(*size), naflex.whole(*size)
        if (down, across) == (1, 1):
            count = naflex.units(whole)
            return f"{marks.start}{marks.image * count}{marks.end}", [
                self._crop(self._resized(pixels, whole))
            ]
        canvas = self._resized(pixels, (down * side, across * side))
        crops, text = [], marks.start
        for row in range(down):
            for column in range(across):
                tile = canvas[:, row * side : (row + 1) * side, column * side : (column + 1) * side]
                crops.append(self._crop(tile))
                text += TILE.format(row=row + 1, column=column + 1) + marks.image * naflex.tile_units
        if naflex.thumbnail:
            crops.append(self._crop(self._resized(pixels, whole)))
            text += marks.thumbnail + marks.image * naflex.units(whole)
        return text + marks.end, crops

    def _resized(self, pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        processor: Any = Siglip2ImageProcessorPil()
        resample = FILTERS[self.vision.settings()["resample"]]
        return processor.resize(image=pixels, size=SizeDict(height=size[0], width=size[1]), resample=resample)

    def _crop(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Of a picture or tile uint8 [3, H, W]; the scale is a part of mean and deviation, as in transformers' backend on
        torchvision."""
        settings, naflex = self.vision.settings(), self.vision.naflex
        factor = np.float32(1.0 / settings["rescale_factor"])
        mean, std = (np.array(settings[name], np.float32)[:, None, None] * factor for name in ("mean", "std"))
        patches = convert_image_to_patches((pixels.astype(np.float32) - mean) / std, naflex.patch_size)
        most = naflex.largest_run * naflex.patches
        values, mask = pad_along_first_dim(patches, most)
        shape = np.array([length // naflex.patch_size for length in pixels.shape[1:]], np.int64)
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shape}
