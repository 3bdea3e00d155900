"""``tiny-qwen2.5-vl`` as the recipe's training and checks see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from vlmexport.calibration.data.scenes.film import RATE

from ..common.packed_captioner import PackedCaptioner
from ..common.packing import Head
from ..common.prompts import PROMPTS
from .checks import evaluate_views
from .layout import PICTURE, Media, head_of, split_turn
from .tower import FRAMES, ROWS, SIDE, WIDTH, encode, patches

CHUNK = 32  # pictures, or pairs of frames, that the tower sees together


class Qwen25VL(PackedCaptioner):
    """Rows are the tower's, in reading order: [B, 64, width] of a picture."""

    model_class: ClassVar[Any] = Qwen2_5_VLForConditionalGeneration
    asks: ClassVar[bool] = True
    prompt: ClassVar[str | None] = PROMPTS[0]
    side: ClassVar[int] = SIDE
    shape: ClassVar[tuple[int, int]] = (ROWS, WIDTH)
    picture: ClassVar[Media] = PICTURE

    def split_turn(self, media: Media) -> tuple[str, str]:
        """See `PackedCaptioner`."""
        return split_turn(self.tokenizer, media)

    def lay_head(self, media: Media) -> Head:
        """See `PackedCaptioner`."""
        return head_of(self.tokenizer, media, FRAMES / RATE)

    def decode(self, embeds: Tensor, positions: Tensor, mask: Tensor, **cache: Any) -> Any:
        """See `PackedCaptioner`."""
        masks = {"full_attention": mask}
        return self.language(inputs_embeds=embeds, position_ids=positions, attention_mask=masks, **cache)

    @classmethod
    def forms(cls) -> tuple[str, ...]:
        """See `Captioner`."""
        return (*super().forms(), "films", "films-questions", "pairs-questions")

    def further(self, seed: int, indices: Sequence[int]) -> dict[str, Any]:
        """See `Captioner`: films and pairs."""
        return evaluate_views(self, seed, indices)

    def further_musts(self) -> dict[str, tuple[float, float]]:
        """See `Captioner`."""
        return {"film_answers": (0.7, 1.0), "film_wrong": (0.0, 0.10), "film_grey": (0.0, 0.10)}

    def pixels(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`: patches [B, 256, 1176]; a picture stands for both frames of a patch."""
        return patches(np.repeat(pictures[:, None], FRAMES, 1))

    @torch.no_grad()
    def rows(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        return self.pair_rows(np.repeat(pictures[:, None], FRAMES, 1))

    @torch.no_grad()
    def pair_rows(self, frames: np.ndarray) -> Tensor:
        """Rows [B, 64, width] of pairs of frames, uint8 (B, 2, side, side, 3)."""
        parts = [frames[at : at + CHUNK] for at in range(0, len(frames), CHUNK)]
        tower = self.model.model.visual
        return torch.cat([encode(tower, patches(part).to(self.device)) for part in parts]).float().cpu()
