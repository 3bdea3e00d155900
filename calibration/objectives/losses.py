"""Losses between a draft and its target, as pure functions of hidden states and logits.

Shapes: N positions, V words, E width, K fused residuals. Logits of any float dtype; softmax in float32.
p is the target's distribution, q the draft's. Every loss is a mean over positions (a scalar).

Greedy or sampled, a drafted token is accepted with probability Σ min(p, q) = 1 − TV(p, q) (Leviathan et al.,
arXiv 2211.17192), so `total_variation` is the loss that is the acceptance, and the others are its surrogates.
FastVLM (arXiv 2510.22641, eq. 3) adds cross entropy, cosine and KL(q‖p), each with weight 1. EAGLE (arXiv
2401.15077) regresses features with smooth L1, soft cross entropy and noise on its inputs; Medusa (arXiv 2401.10774)
weights the cross entropy of its k-th head by 0.8^k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DISTANCES = ("forward", "reverse", "tv")


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


def cosine_distance(hidden_states: Tensor, fused: Tensor) -> Tensor:
    """1 − cos(hidden state, fused one), both [N, E]."""
    return (1.0 - F.cosine_similarity(hidden_states.float(), fused.float(), dim=-1)).mean()


def average_fusion(residuals: Tensor) -> Tensor:
    """Mean of the last residuals, [N, K, E] to [N, E]."""
    return residuals.float().mean(1)


def concatenation_fusion(residuals: Tensor, weight: Tensor) -> Tensor:
    """The residuals side by side through `weight` [E, K·E]: [N, K, E] to [N, E]."""
    return residuals.float().flatten(1) @ weight.T


def attention_fusion(residuals: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The residuals' mean by weights softmax_k((W_q x̂_K) · (W_k x̂_k) / √E): [N, K, E] to [N, E].

    x̂ is x over its root mean square, for later residuals are larger. FastVLM says no more of it than that the last residual
    is the query; values are the residuals themselves, so that their fusion lies among them.

    Args:
        query, key: W_q and W_k, [E, E].
    """
    values = residuals.float()
    normed = F.rms_norm(values, values.shape[-1:])
    queries = normed[:, -1] @ query.T
    scores = torch.einsum("ne,nke->nk", queries, normed @ key.T) / values.shape[-1] ** 0.5
    return torch.einsum("nk,nke->ne", scores.softmax(-1), values)


def overlap(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Σ min(p, q) of every row, [N] in [0, 1]: the acceptance of sampled drafts."""
    return torch.minimum(target_logits.float().softmax(-1), draft_logits.float().softmax(-1)).sum(-1)


def agreement(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """Whether both have the same argmax (ties to the lowest id), bool [N]: the acceptance of greedy drafts."""
    return draft_logits.argmax(-1) == target_logits.argmax(-1)


def smooth_l1(features: Tensor, expected: Tensor, beta: float = 1.0) -> Tensor:
    """Mean over positions and widths of |x|²/(2·beta) below `beta` and |x| − beta/2 above, x = features − expected, both [N, E]."""
    return F.smooth_l1_loss(features.float(), expected.float(), beta=beta)


def cross_entropies(draft_logits: Tensor, tokens: Tensor) -> Tensor:
    """The cross entropy of every head by itself, [K].

    Args:
        draft_logits: [N, K, V]. tokens: int64 [N, K]; −100 where the text ends before, which does not count.
    """
    logits = draft_logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-100, reduction="none")
    known = (tokens != -100).float()
    return (losses.view_as(known) * known).sum(0) / known.sum(0).clamp_min(1.0)


def decayed(means: Tensor, decay: float) -> Tensor:
    """Σ_k decay^k · means[k − 1] over k = 1 … K."""
    weights = decay ** torch.arange(1, len(means) + 1, dtype=means.dtype, device=means.device)
    return (weights * means).sum()


def soft_cross_entropy(draft_logits: Tensor, target_logits: Tensor, kept: Tensor | None = None) -> Tensor:
    """−Σ p log q, where q ranges over a trimmed vocabulary.

    Args:
        draft_logits: [N, K] over the kept words. target_logits: [N, V]. kept: int64 [K], ids of the kept words in V
            (None: all). p is renormalised over them, so the smallest possible value is p's own entropy.
    """
    chosen = target_logits if kept is None else target_logits[:, kept]
    return -(chosen.float().softmax(-1) * draft_logits.float().log_softmax(-1)).sum(-1).mean()


def list_mle(draft_logits: Tensor, ranked: Tensor) -> Tensor:
    """ListMLE: −log of the probability that drawing without replacement from q gives the words in this order.

    (Xia et al., ICML 2008.) It trains the order of the first k proposals, which a tree of drafts needs.

    Args:
        draft_logits: [N, V]. ranked: int64 [N, k], the target's best words, best first.
    """
    logits = draft_logits.float()
    picked = logits.gather(1, ranked)
    rest = logits.scatter(1, ranked, -torch.inf).logsumexp(-1, keepdim=True)  # of words in no rank
    # log of the sum over what is left when rank i is drawn: ranks i … k−1 and the rest.
    left = torch.cat([picked, rest], 1).flip(1).logcumsumexp(1).flip(1)[:, :-1]
    return (left - picked).sum(-1).mean()


def with_noise(features: Tensor, scale: float, generator: torch.Generator | None = None) -> Tensor:
    """`features` with uniform noise in ±scale/2 added, as EAGLE trains (scale 0.2 there) to bear its own errors."""
    noise = torch.rand(features.shape, generator=generator, device=features.device, dtype=features.dtype)
    return features + (noise - 0.5) * scale
