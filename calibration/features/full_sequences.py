"""Whole texts for drafts that look back at what they read, and what such a draft makes of its own features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...exporter.drafts.eagle.eagle_network import EagleNetwork
from ...exporter.drafts.eagle.vispec_network import VispecNetwork
from ..data.reading.records import RecordSet
from ..targets.target import Target
from ..targets.teacher_forcing import Rows, Texts
from .vispec_masks import shifted, sight_of


class TextFeatures:
    """Runs the target for every batch of records."""

    def __init__(self, target: Target, records: RecordSet, taps: Sequence[int] = ()) -> None:
        """`taps`: numbers of layers whose hidden states are wanted, too."""
        self.target, self.records, self.taps = target, records, taps

    def __len__(self) -> int:
        return len(self.records)

    def rows(self, indices: Sequence[int]) -> Texts:
        """The texts of these records."""
        return self.target.texts([self.records[i] for i in indices], self.taps)


def rows_of(texts: Texts, layer: int, residuals: Sequence[int] = ()) -> tuple[Tensor, Rows]:
    """(places bool [B, T], what a draft behind `layer` learns there): the rows of `Target.rows`, in their order.

    `residuals`: rising numbers of layers among the texts' `taps` whose hidden states come before the last layer's.
    """
    # At a place of `learned` the draft of a layer of its own stands one row behind: what it makes is the next row.
    places = torch.zeros_like(texts.learned)
    places[:, 1:] = texts.learned[:, :-1]
    last = texts.hidden[places]
    return places, Rows(
        texts.taps[layer][places],
        torch.stack([*(texts.taps[each][places] for each in residuals), last], 1),
        texts.tokens[places],
        places.nonzero()[:, 0],
        places.cumsum(1)[places],
    )


class Layer(Protocol):
    """A network over pairs of a token and a feature (`EagleNetwork`)."""

    def __call__(
        self,
        embedded: Tensor,
        features: Tensor,
        positions: Tensor,
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        **beside: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...


def unrolled(
    layer: Layer,
    embedded: Tensor,
    features: Tensor,
    steps: int,
    visible: Tensor | None = None,
    beside: Callable[[int], Mapping[str, Tensor]] = lambda step: {},
    positions: Tensor | None = None,
) -> Iterator[Tensor]:
    """The features [B, T, E] that drafting from every place at once would give: after the first step out of the target's
    `features` [B, T, E], then out of the layer's own.

    Step j at place t reads the own feature of step j - 1 there with the token j places further on, at position t + j, or j
    behind the place's own of `positions` (int64 [3, B, T]), on every axis; it sees the target's features up to t and what it drafted itself (training-time test: Li et al., EAGLE-3, arXiv
    2503.01840, section 3.1). The tokens are those of the text: a draft that said another one is rejected there, and what
    it would have gone on with does not matter. Places that are not `visible` (bool [B, T]) are seen by themselves alone.
    `beside` gives further arguments of the layer at a step.
    """
    count = features.shape[1]
    if positions is None:
        positions = torch.arange(count, device=features.device)[None]
    mask = torch.ones(count, count, dtype=torch.bool, device=features.device).tril()[None, None]
    own = torch.eye(count, dtype=torch.bool, device=features.device)[None, None]
    if visible is not None:
        mask = mask & visible[:, None, None] | own
        own = own.expand(len(mask), -1, -1, -1)
    past = None
    for step in range(steps):
        tokens = embedded if step == 0 else shifted(embedded, step)
        features, past = layer(tokens, features, positions + step, mask, past, **beside(step))
        yield features
        mask = torch.cat([mask, own], -1)


def unrolled_over_texts(layer: EagleNetwork, texts: Texts, features: Tensor, steps: int) -> Iterator[Tensor]:
    """`unrolled` over texts of which every place is visible, at positions with as many axes as the layer's."""
    positions = None
    if layer.config.axes > 1:
        positions = texts.positions
        if positions is None:  # a target with one axis
            shape = layer.config.axes, *features.shape[:2]
            positions = torch.arange(shape[-1], device=features.device).expand(shape)
    return unrolled(layer, texts.embedded, features, steps, positions=positions)


def unrolled_over_pictures(
    network: VispecNetwork, texts: Texts, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """`unrolled` over texts of whose pictures the network sees its own tokens."""
    sight = sight_of(network, texts)
    return unrolled(network, texts.embedded, features, steps, sight.visible, sight.beside)
