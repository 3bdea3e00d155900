"""``tiny-blip2-flant5`` as the recipe's training and checks see it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Blip2ForConditionalGeneration

from ..common.captioner import Captioner, to_pixels
from ..common.prompts import PROMPTS
from .model import MEAN, QUERIES, SIDE, STD, WIDTH
from .vision_stage import encode

CHUNK = 100  # pictures that the vision side sees together


class Blip2T5(Captioner):
    """Rows are the Q-Former's outputs [B, 8, width]; the padding of prompts is masked."""

    model_class: ClassVar[Any] = Blip2ForConditionalGeneration
    asks: ClassVar[bool] = True
    prompt: ClassVar[str | None] = PROMPTS[0]
    side: ClassVar[int] = SIDE
    shape: ClassVar[tuple[int, int]] = (QUERIES, WIDTH)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of T5's decoder."""
        return self.model.language_model.decoder.block

    def pixels(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        return to_pixels(pictures, MEAN, STD)

    @torch.no_grad()
    def rows(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        parts = [pictures[at : at + CHUNK] for at in range(0, len(pictures), CHUNK)]
        return torch.cat([encode(self.model, self.pixels(part))[1] for part in parts]).float()

    def logits(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `Captioner`; the pad token, 0, starts a text."""
        embeds, mask = self._encoder_input(image_embeds, prompts)
        inputs = F.pad(targets[:, :-1].clamp_min(0), (1, 0))
        return self.model.language_model(
            inputs_embeds=embeds, attention_mask=mask, decoder_input_ids=inputs, use_cache=False
        ).logits

    def generate(self, image_embeds: Tensor, prompts: Tensor, longest: int) -> Tensor:
        """See `Captioner`."""
        embeds, mask = self._encoder_input(image_embeds, prompts)
        output = self.model.language_model.generate(
            inputs_embeds=embeds,
            attention_mask=mask,
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
            decoder_start_token_id=0,
            eos_token_id=self.end,
            pad_token_id=0,
        )
        return output[:, 1:]

    def head(self, hidden: Tensor) -> Tensor:
        """See `Captioner`."""
        language = self.model.language_model
        return language.lm_head(language.decoder.final_layer_norm(hidden))

    def _encoder_input(self, image_embeds: Tensor, prompts: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, 8 + p, width] and mask of pictures and prompts."""
        words = self.model.language_model.shared(prompts.clamp_min(0))
        embeds = torch.cat([self.model.language_projection(image_embeds), words], 1)
        mask = torch.cat([torch.ones(image_embeds.shape[:2], dtype=torch.long), (prompts >= 0).long()], 1)
        return embeds, mask
