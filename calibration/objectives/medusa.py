"""Medusa in training: heads on a target learn what it says k tokens further on.

(Cai et al., arXiv 2401.10774, section 2.2.1: Σ_k decay^k · CE of head k. The head that looks k tokens beyond the LM
head's own is head k, so none repeats that one.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...exporter.drafts.common.base import Draft
from ...exporter.drafts.medusa.medusa import RANKS, MedusaDraft
from ...exporter.drafts.medusa.medusa_network import MedusaConfig, MedusaHeads
from ..features.features import FeatureSource, in_batches
from ..targets.target import Rows
from . import losses
from .base import Counts, LearnedTarget, Objective, identity_of
from .medusa_options import MedusaOptions

BATCH = 64
"""Records that are looked at together while hits are counted."""


class MedusaObjective(Objective):
    """Medusa-1: the target is frozen. `counts` is asked for where the heads choose from frequent tokens only."""

    kind = MedusaDraft.kind
    shown = {"head 1": "hit1", "tokens": "expected"}
    network: MedusaHeads

    def __init__(self, options: MedusaOptions, target: LearnedTarget, counts: Counts | None = None) -> None:
        super().__init__()
        self.options: MedusaOptions = options
        self.target = identity_of(target)
        table = target.lm_head.weight.detach()
        trimmed, d2t = None, None
        if options.head == "trimmed":
            assert counts is not None, "the heads need to know which tokens are frequent"
            d2t = frequent(counts(), options.head_vocabulary)
            trimmed = len(d2t)
        vocabulary, width = table.shape
        self.network = MedusaHeads(
            MedusaConfig(width, vocabulary, options.heads, options.head_layers, options.head, trimmed)
        )
        self.network.start_from(table, d2t)

    def loss(self, batch: Rows, target: LearnedTarget) -> tuple[Tensor, dict[str, Tensor]]:
        """The decayed sum; parts as `heads_loss`."""
        total, parts = self.heads_loss(target.features(batch.residuals[:, -1]), batch, target)
        parts["loss"] = total
        return total, {name: value.detach() for name, value in parts.items()}

    def heads_loss(
        self, features: Tensor, batch: Rows, target: LearnedTarget
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(Σ_k decay^k · CE_k, its parts) of heads on what the LM head reads, [N, E].

        Parts have each head's cross entropy and its share of right first proposals, over the rows that know the
        token, and `expected`, the tokens of a cycle if heads were independent.
        """
        logits = self.network(features, target.lm_head.weight)
        labels = heads_labels(self.network, batch)
        means = losses.cross_entropies(logits, labels)
        right = (logits.detach().argmax(-1) == labels) & (labels >= 0)
        hits = right.float().sum(0) / (ahead(batch, self.options.heads) >= 0).float().sum(0).clamp_min(1)
        parts = {f"head{k}": mean for k, mean in enumerate(means, 1)}
        parts |= {f"hit{k}": hit for k, hit in enumerate(hits, 1)}
        parts["expected"] = 1 + hits.cumprod(0).sum()
        return losses.decayed(means, self.options.decay), parts

    def score(self, means: Mapping[str, float]) -> float:
        """The expected tokens of a cycle."""
        return means["expected"]

    def learning_rate(self, hidden_size: int) -> float:
        """The published one of frozen targets, 1e-3, is for a width of 4,096; in inverse proportion to the width, 3e-2 at most:
        the best of those that were tried at 128, beside a target that learns the highest of them, and better than 1e-3 at 576
        (docs/how-to/training-runs.md)."""
        return min(3e-2, max(1e-3, 1e-3 * 4096 / hidden_size))

    def draft(self, provenance: Mapping[str, Any], evaluation: Mapping[str, Any]) -> MedusaDraft:
        return MedusaDraft(
            network=self.network,
            target=self.target,
            provenance=dict(provenance),
            evaluation=dict(evaluation),
        )

    def finished(self, draft: Draft, source: FeatureSource, target: LearnedTarget) -> MedusaDraft:
        """The draft with its hits by rank, from which trees grow."""
        assert isinstance(draft, MedusaDraft)
        device = next(self.network.parameters()).device
        hits = measure_hits(draft.network.to(device), source, target)
        return replace(draft, evaluation=draft.evaluation | {"hits": hits})


def frequent(counts: Tensor, size: int) -> Tensor:
    """Ids [at most `size`] of the most frequent tokens, lowest first; tokens that never came are left out."""
    order = torch.argsort(counts, descending=True, stable=True)[:size]
    return order[counts[order] > 0].sort().values


def ahead(batch: Rows, heads: int) -> Tensor:
    """int64 [N, heads]: the token that head k = 1 … should propose after each row, −100 where the text ends before.

    `tokens[r]` is what the LM head says after row r; head k looks k tokens further, within the same record.
    """
    count = len(batch)
    tokens = torch.full((count, heads), -100, dtype=torch.long, device=batch.tokens.device)
    for k in range(1, min(heads, count - 1) + 1):
        same = batch.records[k:] == batch.records[:-k]
        tokens[:-k, k - 1] = torch.where(same, batch.tokens[k:], -100)
    return tokens


def heads_labels(network: MedusaHeads, batch: Rows) -> Tensor:
    """`ahead` as indices of the heads' own vocabulary; −100 for tokens that it lacks, too."""
    labels, config = ahead(batch, network.config.heads), network.config
    if config.trimmed is None:
        return labels
    places = torch.full((config.vocab_size or 0,), -100, dtype=torch.long, device=labels.device)
    places[network.d2t] = torch.arange(config.trimmed, device=labels.device)
    return torch.where(labels >= 0, places[labels.clamp_min(0)], -100)


def heads_logits(network: MedusaHeads, batch: Rows, target: LearnedTarget) -> Tensor:
    """Logits [N, heads, proposed] after the target's last hidden states."""
    return network(target.features(batch.residuals[:, -1]), target.lm_head.weight)


@torch.no_grad()
def measure_hits(network: MedusaHeads, source: FeatureSource, target: LearnedTarget) -> list[list[float]]:
    """`hits[k][r]`: how often rank r of head k + 1 is the right token, where the tokens before it were all among the
    proposals of theirs. What a tree of these heads can expect at each node."""
    network.eval()
    config = network.config
    ranks = min(RANKS, target.lm_head.weight.shape[0] if config.proposed is None else config.proposed)
    hits = torch.zeros(config.heads, ranks, dtype=torch.float64)
    asked = torch.zeros(config.heads, dtype=torch.float64)
    for batch in in_batches(source, BATCH):
        best = heads_logits(network, batch, target).topk(ranks, -1).indices
        wanted = ahead(batch, config.heads)
        right = (best == heads_labels(network, batch)[..., None]).cpu()
        alive = torch.ones(len(batch), dtype=torch.bool)
        for k in range(config.heads):
            known = alive & (wanted[:, k] >= 0).cpu()
            asked[k] += known.sum()
            hits[k] += right[known, k].sum(0)
            alive = known & right[:, k].any(-1)
    return [[round(float(x), 5) for x in head] for head in hits / asked.clamp_min(1)[:, None]]
