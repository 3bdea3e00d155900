"""``tiny-smolvlm2`` as the recipe's training and checks see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import SmolVLMForConditionalGeneration

from ..common.packed_captioner import PackedCaptioner
from ..common.packing import Head, plain_head, split_turn
from ..common.prompts import PROMPTS
from .checks import LEAST_GAIN, evaluate_tiles
from .model import WIDTH
from .tiles import SIDE, TILE_ROWS, TILED, TILES, Tiling, encode, pixels_of
from .tokenizer import IMAGE

CHUNK = 100  # pictures that the tower sees together


class SmolVLM2(PackedCaptioner):
    """Rows are the connector's, tile by tile, those of the whole picture last: [B, 40, width]."""

    model_class: ClassVar[Any] = SmolVLMForConditionalGeneration
    asks: ClassVar[bool] = True
    prompt: ClassVar[str | None] = PROMPTS[0]
    side: ClassVar[int] = SIDE
    shape: ClassVar[tuple[int, int]] = (TILES * TILE_ROWS, WIDTH)
    picture: ClassVar[Tiling] = TILED

    @property
    def language(self) -> Any:
        """See `InsideCaptioner`."""
        return self.model.model.text_model

    def split_turn(self, media: Tiling) -> tuple[str, str]:
        """See `PackedCaptioner`."""
        before, after = split_turn(self.tokenizer, [{"type": "image"}])
        return before.replace(IMAGE, media.text), after

    def lay_head(self, media: Tiling) -> Head:
        """See `PackedCaptioner`."""
        ids = self.tokenizer(self.split_turn(media)[0])["input_ids"]
        return plain_head(ids, self.model.config.image_token_id)

    def decode(self, embeds: Tensor, positions: Tensor, mask: Tensor, **cache: Any) -> Any:
        """See `PackedCaptioner`."""
        return self.language(inputs_embeds=embeds, position_ids=positions[0], attention_mask=mask, **cache)

    def pixels(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`: tiles [B, 10, 3, 32, 32]."""
        return pixels_of(pictures)

    @torch.no_grad()
    def rows(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        parts = [self.pixels(pictures[at : at + CHUNK]) for at in range(0, len(pictures), CHUNK)]
        return torch.cat([encode(self.model.model, part.to(self.device)) for part in parts]).float().cpu()

    def further(self, seed: int, indices: Sequence[int]) -> dict[str, Any]:
        """See `Captioner`: what the tiles show."""
        return evaluate_tiles(self, seed, indices)

    def further_musts(self) -> dict[str, tuple[float, float]]:
        """See `Captioner`."""
        return {"details_gain": (LEAST_GAIN, 1.0)}
