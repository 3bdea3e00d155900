"""Losses between a draft and its target, as pure functions of rows.

Shapes: N rows, V words, E width, K fused residuals. Logits of any float dtype; softmax in float32.
p is the target's distribution, q the draft's. Every loss is a mean over rows (a scalar).

Greedy or sampled, a drafted token is accepted with probability Σ min(p, q) = 1 − TV(p, q) (Leviathan et al.,
arXiv 2211.17192), so `total_variation` is the loss that is the acceptance, and the others are its surrogates.
FastVLM (arXiv 2510.22641, eq. 3) adds cross entropy, cosine and KL(q‖p), each with weight 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DISTANCES = ("forward", "reverse", "tv")
FUSIONS = ("average", "last", "concat-frozen", "concat-stopped")


def cross_entropy(draft_logits: Tensor, tokens: Tensor) -> Tensor:
    """−log q(token), [N, V] and int64 [N]."""
    return F.cross_entropy(draft_logits.float(), tokens)


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p − log q): the draft must cover what the target may say."""
    p, q = target_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def reverse_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(q‖p) = Σ q (log q − log p), the one that FastVLM prints."""
    return forward_kl(target_logits, draft_logits)


def total_variation(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """½ Σ |p − q| = 1 − Σ min(p, q)."""
    p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
    return 0.5 * (p - q).abs().sum(-1).mean()


def distillation(draft_logits: Tensor, target_logits: Tensor, distance: str) -> Tensor:
    """The distance of that name, one of `DISTANCES`."""
    functions = {"forward": forward_kl, "reverse": reverse_kl, "tv": total_variation}
    return functions[distance](draft_logits, target_logits)


def cosine_distance(rows: Tensor, fused: Tensor) -> Tensor:
    """1 − cos(row, fused row), both [N, E]."""
    return (1.0 - F.cosine_similarity(rows.float(), fused.float(), dim=-1)).mean()


def average_fusion(residuals: Tensor) -> Tensor:
    """Mean of the last residuals, [N, K, E] to [N, E]."""
    return residuals.float().mean(1)


def concatenation_fusion(residuals: Tensor, weight: Tensor) -> Tensor:
    """The residuals side by side through `weight` [E, K·E]: [N, K, E] to [N, E].

    FastVLM trains this projection with the cosine, which can then be met by moving the target; callers here
    keep it frozen or train it by another loss and detach the result.
    """
    return residuals.float().flatten(1) @ weight.T


def overlap(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Σ min(p, q) of every row, [N] in [0, 1]: the acceptance of sampled drafts."""
    return torch.minimum(target_logits.float().softmax(-1), draft_logits.float().softmax(-1)).sum(-1)


def agreement(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Whether both have the same argmax (ties to the lowest id), bool [N]: the acceptance of greedy drafts."""
    return draft_logits.argmax(-1) == target_logits.argmax(-1)
