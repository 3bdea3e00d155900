"""``tiny-qwen2.5-vl`` as the recipe's training and checks see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from vlmexport.calibration.data.scenes.film import RATE

from ..common.inside import InsideCaptioner, unpadded
from ..common.prompts import PROMPTS
from .checks import evaluate_views
from .layout import PICTURE, Head, Media, Packed, head_of, packed, split_turn
from .tower import FRAMES, ROWS, SIDE, WIDTH, encode, patches

CHUNK = 32  # pictures, or pairs of frames, that the tower sees together


class Qwen25VL(InsideCaptioner):
    """Rows are the tower's, in reading order: [B, 64, width] of a picture. Prompts are what the user says and all up to the
    answer; what stands before them is laid out here.

    What the base class does with a picture, `answering` does with any `Media`.
    """

    model_class: ClassVar[Any] = Qwen2_5_VLForConditionalGeneration
    asks: ClassVar[bool] = True
    prompt: ClassVar[str | None] = PROMPTS[0]
    side: ClassVar[int] = SIDE
    shape: ClassVar[tuple[int, int]] = (ROWS, WIDTH)

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        self.head_of = cache(lambda media: head_of(tokenizer, media, FRAMES / RATE))
        self._tail = tokenizer(split_turn(tokenizer, PICTURE)[1])["input_ids"]
        self.media = PICTURE

    def answering(self, media: Media) -> Qwen25VL:
        """The same model where the embeddings are those of `media`."""
        other = type(self)(self.model, self.tokenizer)
        other.media = media
        return other

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

    @property
    def before(self) -> int:
        """See `InsideCaptioner`."""
        return len(self.head_of(self.media).ids)

    def prompt_ids(self, text: str) -> list[int]:
        """See `Captioner`; with the end of the user's turn and the beginning of the answer."""
        return [*super().prompt_ids(text), *self._tail]

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

    def hidden(self, head: Head, image_embeds: Tensor, batch: Packed, **cache: Any) -> Any:
        """What the decoder gives for a batch, normed: [B, S, width]. The batch may lie on the CPU."""
        batch = batch.to(self.device)
        seen = self.language.embed_tokens(batch.ids)
        seen = seen.index_copy(1, head.places.to(self.device), image_embeds.to(self.device, seen.dtype))
        return self.language(
            inputs_embeds=seen,
            position_ids=batch.positions,
            attention_mask={"full_attention": batch.mask},
            **(cache or {"use_cache": False}),
        )

    def hidden_of(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `InsideCaptioner`."""
        head = self.head_of(self.media)
        batch = packed(head, [[pair] for pair in zip(unpadded(prompts), unpadded(targets), strict=True)])
        return self.hidden(head, image_embeds, batch).last_hidden_state

    def generate(self, image_embeds: Tensor, prompts: Tensor, longest: int) -> Tensor:
        """See `Captioner`; greedy with a cache."""
        head = self.head_of(self.media)
        batch = packed(head, [[(prompt, [])] for prompt in unpadded(prompts)]).to(self.device)
        out = self.hidden(head, image_embeds, batch, use_cache=True)
        keep = batch.group >= 0
        last = keep.sum(1) - 1
        each = torch.arange(len(last), device=self.device)
        row, place = out.last_hidden_state[each, last], batch.positions[0, each, last]
        tokens: list[Tensor] = []
        ended = torch.zeros(len(last), dtype=torch.bool, device=self.device)
        while True:
            token = self.model.lm_head(row).argmax(-1)
            tokens.append(token)
            ended |= token == self.end
            if ended.all() or len(tokens) == longest:
                return torch.stack(tokens, 1).cpu()
            place = place + 1
            keep = torch.cat([keep, torch.ones(len(keep), 1, dtype=torch.bool, device=self.device)], 1)
            out = self.language(
                inputs_embeds=self.language.embed_tokens(token[:, None]),
                position_ids=place[None, :, None].expand(3, -1, -1),
                attention_mask={"full_attention": keep[:, None, None]},
                past_key_values=out.past_key_values,
                use_cache=True,
            )
            row = out.last_hidden_state[:, -1]
