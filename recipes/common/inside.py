"""Captioners whose decoder reads a picture's embeddings among its text."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from .captioner import Captioner


class InsideCaptioner(Captioner):
    """A decoder `language_model` that reads what stands before a picture, its embeddings, the prompt and the text."""

    @property
    @abstractmethod
    def before(self) -> int:
        """Places before the prompt: the picture's embeddings, and what stands before them."""

    @abstractmethod
    def hidden_of(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """What the decoder gives for the texts, normed: [B, S, width], where the model lies."""

    @property
    def language(self) -> Any:
        """The decoder without its head."""
        return self.model.model.language_model

    @property
    def layers(self) -> nn.ModuleList:
        """Of the decoder."""
        return self.language.layers

    def logits(self, image_embeds: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `Captioner`."""
        hidden = self.hidden_of(image_embeds, prompts, targets)
        return self.model.lm_head(self.reading(hidden, prompts, targets)).cpu()

    def reading(self, hidden: Tensor, prompts: Tensor, targets: Tensor) -> Tensor:
        """See `Captioner`: a row before each target."""
        places = self.places(prompts, targets).clamp_max(hidden.shape[1] - 1).to(hidden.device)
        return hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))

    def head(self, hidden: Tensor) -> Tensor:
        """See `Captioner`."""
        return self.model.lm_head(self.language.norm(hidden)).cpu()

    def places(self, prompts: Tensor, targets: Tensor) -> Tensor:
        """Where the hidden states stand that say the targets: [B, t]."""
        return self.before - 1 + (prompts >= 0).sum(1, keepdim=True) + torch.arange(targets.shape[1])


def unpadded(ids: Tensor) -> list[list[int]]:
    """Rows of ids without what fills them up."""
    return [[token for token in row if token >= 0] for row in ids.tolist()]
