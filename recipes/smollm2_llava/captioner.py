"""``smollm2-llava`` as the recipe's training and checks see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import LlavaForConditionalGeneration

from ..common.captioner import cross_entropy, to_pixels
from ..common.inside import InsideCaptioner, unpadded
from ..common.prompts import PROMPTS
from .model import MEAN, ROWS, SIDE, STD, WIDTH
from .tokenizer import IMAGE, split_turn

CHUNK = 250  # pictures that the tower sees together


class SmolLlava(InsideCaptioner):
    """Rows are the tower's: [B, 36, width]. Prompts are what the user says behind the picture and all up to the answer."""

    model_class: ClassVar[Any] = LlavaForConditionalGeneration
    asks: ClassVar[bool] = True
    prompt: ClassVar[str | None] = PROMPTS[0]
    side: ClassVar[int] = SIDE
    shape: ClassVar[tuple[int, int]] = (ROWS, WIDTH)
    early_range: ClassVar[tuple[float, float]] = (0.0, 0.65)  # a model of real texts says little early

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer)
        before, self._tail = split_turn()
        self._head: list[int] = tokenizer(before, add_special_tokens=False)["input_ids"]

    @property
    def before(self) -> int:
        """See `InsideCaptioner`."""
        return len(self._head) + ROWS

    def prompt_ids(self, text: str) -> list[int]:
        """See `Captioner`; tokens depend on what stands around them, so the text is read with it."""
        ids = self.tokenizer(f"{IMAGE}\n{text}{self._tail}", add_special_tokens=False)["input_ids"]
        assert ids[0] == self.tokenizer.convert_tokens_to_ids(IMAGE)
        return ids[1:]

    def pixels(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        return to_pixels(pictures, MEAN, STD)

    @torch.no_grad()
    def rows(self, pictures: np.ndarray) -> Tensor:
        """See `Captioner`."""
        tower, parts = self.model.model.vision_tower, range(0, len(pictures), CHUNK)
        return torch.cat([encode(tower, stored(pictures[at : at + CHUNK])).float().cpu() for at in parts])

    def loss(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `Captioner`; only hidden states before a target are given to the head."""
        hidden = self.hidden_of(image_embeds, prompts, targets)
        is_target = targets >= 0
        each = torch.arange(len(targets))[:, None] * hidden.shape[1]
        at = (each + self.places(prompts, targets))[is_target].to(self.device, non_blocking=True)
        logits = self.model.lm_head(hidden.flatten(0, 1).index_select(0, at))
        return cross_entropy(logits[None], targets[is_target].to(self.device, non_blocking=True))

    def generate(self, image_embeds: Tensor, prompts: Tensor, longest: int) -> Tensor:
        """See `Captioner`."""
        texts = unpadded(prompts)
        seen = self._embedded(image_embeds, texts)
        longer = max(map(len, texts)) - torch.tensor([[len(text)] for text in texts])
        at = (torch.arange(seen.shape[1]) - longer).to(self.device)  # what fills a text up comes first here
        ids = self.model.generate(
            inputs_embeds=seen.gather(1, at.clamp_min(0)[..., None].expand_as(seen)),
            attention_mask=(at >= 0).long(),
            eos_token_id=self.end,
            pad_token_id=self.end,
            max_new_tokens=longest,
            do_sample=False,
        )
        return ids.cpu()

    def hidden_of(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `InsideCaptioner`."""
        texts = [p + t for p, t in zip(unpadded(prompts), unpadded(targets), strict=True)]
        seen = self._embedded(image_embeds, texts)  # behind a text nothing is read
        return self.language(inputs_embeds=seen, use_cache=False).last_hidden_state

    def _embedded(self, image_embeds: Tensor, texts: list[list[int]]) -> Tensor:
        """What the decoder reads: the head of a turn, the picture's embeddings, the text, filled up behind its end."""
        width, before = max(map(len, texts)), len(self._head)
        ids = torch.tensor([self._head + text + [self.end] * (width - len(text)) for text in texts])
        words = self.language.embed_tokens(ids.to(self.device, non_blocking=True))
        shown = self.model.model.multi_modal_projector(image_embeds.to(self.device, non_blocking=True))
        return torch.cat([words[:, :before], shown.to(words.dtype), words[:, before:]], 1)


def stored(pictures: np.ndarray) -> Tensor:
    """Pictures uint8 (B, side, side, 3) as a tensor of its own."""
    return torch.from_numpy(np.array(pictures))


def encode(tower: Any, pictures: Tensor) -> Tensor:
    """The patches' hidden states [B, 36, width] after the tower's last layer, of uint8 pictures [B, side, side, 3]."""
    return encode_all(tower, pictures, ())[0]


def encode_all(tower: Any, pictures: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """As `encode`, and the same after some of the layers, from 1."""
    shown = to_pixels(pictures.to(tower.device, non_blocking=True), MEAN, STD)
    output = tower(pixel_values=shown, output_hidden_states=bool(layers))
    states = [output.last_hidden_state, *(output.hidden_states[n] for n in layers)]
    return [state[:, 1:] for state in states]
