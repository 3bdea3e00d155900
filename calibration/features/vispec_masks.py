"""What a ViSpec layer sees of the pictures in whole texts (arXiv 2509.15235, section 3.1).

Every pair keeps its place; those of a picture's embeddings are hidden but for the last, where the picture's tokens stand. That
is what the runtime computes, which leaves the hidden ones out. Of a video every time step is a picture, and text behind it
knows the mean of their global features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...exporter.drafts.eagle.vispec_network import VispecNetwork
from ..targets.teacher_forcing import Texts


@dataclass(frozen=True)
class Sight:
    """By place [B, T]: what is `visible` at all, where a picture's token stands (`compressed`), and `visual` [B, T, E], that
    token or the global feature that a text position knows."""

    visible: Tensor
    compressed: Tensor
    visual: Tensor

    def beside(self, step: int) -> Mapping[str, Tensor]:
        """Arguments of the network at a step of `unrolled`: own features stand behind text alone."""
        if step == 0:
            return {"visual": self.visual, "compressed": self.compressed}
        known = self.visual.masked_fill(self.compressed[..., None], 0.0)
        return {"visual": shifted(known, step), "compressed": torch.zeros_like(self.compressed)}


def sight_of(network: VispecNetwork, texts: Texts) -> Sight:
    """With the graph of the adaptor."""
    batch, count = texts.learned.shape
    device = texts.hidden.device
    visible = torch.ones(batch, count, dtype=torch.bool, device=device)
    compressed = torch.zeros_like(visible)
    embeds: list[Tensor] = [texts.hidden.new_zeros(1, texts.hidden.shape[-1])]
    index = torch.zeros(batch, count, dtype=torch.long, device=device)
    made = 1
    for b, pictures in enumerate(texts.pictures):
        for start, steps in pictures:
            features = []
            for step in steps:
                own = network.imadpt(step)
                features.append(own[-1:])
                embeds.append(own[:-1])
                first, end, tokens = max(start - 1, 0), start + len(step) - 1, len(own) - 1
                shown = min(tokens, end - first)
                visible[b, first : end - shown] = False
                compressed[b, end - shown : end] = True
                index[b, end - shown : end] = torch.arange(
                    made + tokens - shown, made + tokens, device=device
                )
                made += tokens
                start += len(step)
            embeds.append(torch.cat(features).mean(0, keepdim=True))
            index[b, end:] = made
            made += 1
    return Sight(visible, compressed, torch.cat(embeds)[index])


def shifted(values: Tensor, places: int) -> Tensor:
    """`values` [B, T, ...] of so many places further on, zero (False) behind the end."""
    out = torch.zeros_like(values)
    out[:, : max(0, values.shape[1] - places)] = values[:, places:]
    return out
