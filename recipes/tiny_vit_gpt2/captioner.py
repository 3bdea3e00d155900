"""``tiny-vit-gpt2`` as the recipe's training and checks see it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import VisionEncoderDecoderModel
from transformers.modeling_outputs import BaseModelOutput

from ..common.captioner import Captioner, to_pixels
from .model import MEAN, ROWS, SIDE, STD, WIDTH

CHUNK = 100  # pictures that the tower sees together


class ViTGPT2(Captioner):
    """Rows are the tower's, the class token's first: [B, 65, width]. It takes no prompt and answers no questions."""

    model_class: ClassVar[Any] = VisionEncoderDecoderModel
    asks: ClassVar[bool] = False
    prompt: ClassVar[str | None] = None
    side: ClassVar[int] = SIDE
    shape: ClassVar[tuple[int, int]] = (ROWS, WIDTH)

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks of GPT-2."""
        return self.model.decoder.transformer.h

    def pixels(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        return to_pixels(pictures, MEAN, STD)

    @torch.no_grad()
    def rows(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        pixels = [self.pixels(pictures[at : at + CHUNK]) for at in range(0, len(pictures), CHUNK)]
        return torch.cat([self.model.encoder(pixel_values=x).last_hidden_state for x in pixels]).float()

    def logits(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `Captioner`; the end token starts and pads a text, too."""
        before = targets[:, :-1]
        inputs = F.pad(before.masked_fill(before < 0, self.end), (1, 0), value=self.end)
        return self.model.decoder(
            input_ids=inputs, encoder_hidden_states=image_embeds, use_cache=False
        ).logits

    def generate(self, image_embeds: Tensor, prompts: Tensor, longest: int) -> Tensor:
        """See `Captioner`."""
        output = self.model.generate(
            encoder_outputs=BaseModelOutput(last_hidden_state=image_embeds),  # type: ignore[arg-type]
            decoder_start_token_id=self.end,
            eos_token_id=self.end,
            pad_token_id=self.end,
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
        )
        return output[:, 1:]  # type: ignore[index]

    def head(self, hidden: Tensor) -> Tensor:
        """See `Captioner`."""
        decoder = self.model.decoder
        return decoder.lm_head(decoder.transformer.ln_f(hidden))
