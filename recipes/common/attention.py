"""Attention as plain matrix products, for the training on a CPU.

Behind a picture every place has a mask of its own, and PyTorch's fused kernel for the CPU then takes 1.6 times as long for a
step forwards and back (16 × 257 places, bfloat16, one thread of an AMD EPYC: 66 ms a layer against 42)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "dense_grouped"


def dense_grouped(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of grouped queries: what they give [B, S, heads, width], and no weights.

    Args:
        query: [B, heads, S, width]. key, value: [B, groups, T, width], not repeated for the heads of a group.
        attention_mask: bool [B, 1, S, T], what each place sees: one place at least.
    """
    batch, heads, size, width = query.shape
    groups = key.shape[1]
    scores = (query * scaling).reshape(batch, groups, -1, width) @ key.mT
    unseen = torch.zeros_like(attention_mask, dtype=scores.dtype).masked_fill_(~attention_mask, -torch.inf)
    scores.view(batch, groups, heads // groups, size, -1).add_(unseen[:, :, None])
    output = torch.softmax(scores, -1) @ value
    return output.view(batch, heads, size, width).transpose(1, 2), None


def use_dense_attention(language: Any) -> None:
    """Lets a decoder compute its attention so; a saved model does not remember it."""
    AttentionInterface.register(NAME, dense_grouped)
    language.config._attn_implementation = NAME
