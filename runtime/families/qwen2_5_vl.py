"""Qwen2.5-VL: pictures of any size and videos, anywhere in a prompt or a conversation."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BundleError
from ..images.load import load_image
from ..images.processors import preprocess
from ..images.processors.patches import fitted, settings_of
from ..images.windows import patchified, windows
from ..text.prompt import check_ids, check_length
from .base import Prepared, Prompt, Source, image_list
from .chat import Media, Medium, media_ids
from .mrope import Span, positions


class Qwen25VL:
    """Source of the layout: transformers `Qwen2_5_VLProcessor` and `Qwen2_5_VLModel.get_rope_index`."""

    name = "qwen2.5-vl"

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Text becomes one user message behind its pictures, a list is a whole conversation; `RawPrompt`, and text where
        the bundle has no template, may hold `<|image_pad|>` themselves, else the pictures come first."""
        manifest, tokenizer = bundle.manifest, bundle.tokenizer
        text, settings = manifest.text, manifest.image
        mark = tokenizer.token(text.image_token_id)
        if settings is None or mark is None:
            raise BundleError(
                "manifest fields 'image' and 'text.image_token_id' must be set for family 'qwen2.5-vl'; build the bundle "
                "again"
            )
        images = [load_image(each) for each in image_list(image)]
        ids = media_ids(bundle, prompt, ["image"] * len(images), written(mark))
        grid, least, most = settings_of(settings)
        sizes = [fitted(each.height, each.width, grid.unit_size, least, most) for each in images]
        units = [(height // grid.unit_size, width // grid.unit_size) for height, width in sizes]
        places = np.flatnonzero(ids == text.image_token_id)
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = [down * across for down, across in units]
        starts = (np.cumsum(repeats) - repeats)[places]
        ids = np.repeat(ids, repeats)
        limit = manifest.limits.max_length
        check_length(ids, limit - 1, f"max_length ({limit}) less one, image rows included")
        check_ids(ids, text.vocab_size)
        if not images:
            return Prepared(ids)
        spans = [Span(int(start), 1, *size) for start, size in zip(starts, units, strict=True)]
        frames = (np.repeat(preprocess(each, settings), grid.temporal_patch_size, 0) for each in images)
        return Prepared(
            ids,
            vision=tuple(
                windows(patchified(frame, grid), *size, grid)
                for frame, size in zip(frames, units, strict=True)
            ),
            row_slots=np.flatnonzero(ids == text.image_token_id),
            positions=positions(len(ids), spans),
        )


def written(image: str) -> Media:
    """What stands beside text in a prompt of this family."""
    return {"image": Medium(image, f"<|vision_start|>{image}<|vision_end|>", "pictures")}
