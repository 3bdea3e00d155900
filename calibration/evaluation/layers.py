"""Acceptance of layers that draft (EAGLE, ViSpec) on held-out data: what chains of their likeliest tokens would reach.

Such a draft has a state, but what it holds when a chain begins are the target's own features, whatever was drafted
before. A chain is only followed as far as it says the text's tokens. So on text that the target wrote greedily one
teacher-forced pass with the layer unrolled from every place (`features/full_sequences.py`) knows every cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor

from ...exporter.drafts.eagle.eagle_network import EagleNetwork
from ..features.vispec_masks import shifted
from ..objectives.base import LearnedTarget
from ..objectives.losses import overlap
from ..targets.teacher_forcing import Texts
from .acceptance import Counted, chain_cycles, likeliest

Unroll = Callable[[Texts, Tensor, int], Iterator[Tensor]]
"""(texts, features [B, T, E], steps) → the features that drafting from every place gives, step by step."""


class LayerCount(Counted):
    """Collects the acceptance of a layer; `agreement` and `overlap` are of the first drafted token."""

    def __init__(
        self,
        layer: EagleNetwork,
        unroll: Unroll,
        target: LearnedTarget,
        draft_length: int,
        eos_token_ids: Collection[int],
    ) -> None:
        """`layer` drafts for `target`."""
        super().__init__(draft_length, eos_token_ids)
        self._layer, self._unroll, self._target = layer, unroll, target

    @torch.no_grad()
    def add(self, texts: Texts, features: Callable[[Tensor], Tensor]) -> None:
        """`features` maps the target's last hidden states to what its LM head reads."""
        if not len(texts):
            return
        network, learned, given = self._layer, texts.learned, features(texts.hidden)
        own = self._target.logits(shifted(given, 1)[learned])
        hits: list[Tensor] = []
        given = network.given(given, texts.taps)
        for step, step_features in enumerate(self._unroll(texts, given, self.draft_length)):
            logits = network.logits(step_features[learned], self._target.lm_head.weight)
            ranked = likeliest(logits)
            if network.config.trimmed is not None:
                ranked = network.d2t[ranked]
            best = ranked[:, 0]
            if step == 0:
                self._rank(0, ranked, shifted(texts.tokens, 1)[learned])
                if network.config.trimmed is not None:
                    logits = torch.full_like(own, -torch.inf).index_copy_(1, network.d2t, logits)
                self.shared += overlap(logits, own).sum().item()
            inside, said = shifted(learned, step)[learned], shifted(texts.tokens, step + 1)[learned]
            hits.append((best == said) & inside)
        right = torch.stack(hits, 1).cpu().numpy()
        records = torch.arange(len(learned), device=learned.device)[:, None].expand(learned.shape)[learned]
        # Of each record the first learned place says token 1 of its answer.
        positions = learned.long().cumsum(1)[learned].cpu().numpy()
        self._place(positions, right[:, 0])
        self._replay(records, shifted(texts.tokens, 1)[learned], right, chain_cycles)
