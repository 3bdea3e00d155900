"""Whole texts for drafts that look back at what they read, and what such a draft makes of its own features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..data.records import RecordSet
from ..targets.target import Target, Texts


class TextFeatures:
    """Runs the target for every batch of records."""

    def __init__(self, target: Target, records: RecordSet) -> None:
        self.target, self.records = target, records

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, indices: Sequence[int]) -> Texts:
        """The texts of these records."""
        return self.target.texts([self.records[i] for i in indices])


class Layer(Protocol):
    """A network over pairs of a token and a feature (`EagleNetwork`)."""

    def __call__(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...


def shifted(values: Tensor, places: int) -> Tensor:
    """`values` [B, T, ...] of so many places further on, zero (False) behind the end."""
    out = torch.zeros_like(values)
    out[:, : max(0, values.shape[1] - places)] = values[:, places:]
    return out


def unrolled(layer: Layer, embedded: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
    """The features [B, T, E] that drafting from every place at once would give: after the first step out of the target's
    `features` [B, T, E], then out of the layer's own.

    Step j at place t reads the own feature of step j - 1 there with the token j places further on, at position t + j; it
    sees the target's features up to t and what it drafted itself (training-time test: Li et al., EAGLE-3, arXiv
    2503.01840, section 3.1). The tokens are those of the text: a draft that said another one is rejected there, and what
    it would have gone on with does not matter.
    """
    count = features.shape[1]
    positions = torch.arange(count, device=features.device)[None]
    mask = torch.ones(count, count, dtype=torch.bool, device=features.device).tril()
    own = torch.eye(count, dtype=torch.bool, device=features.device)
    past = None
    for step in range(steps):
        tokens = embedded if step == 0 else shifted(embedded, step)
        features, past = layer(tokens, features, positions + step, mask[None, None], past)
        yield features
        mask = torch.cat([mask, own], 1)
