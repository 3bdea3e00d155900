"""What the cosine of an imitation draft looks at: the target's last residuals, fused to one row.

FastVLM (arXiv 2510.22641, section 3.2) averages the last four, concatenates them before a linear layer, or pools them by an
attention whose query is the last one. Its linear layer and its attention are trained by the cosine itself, which can then be
met by moving what it aims at: a linear layer may turn to whatever the draft's hidden states say already. Here they learn, unless asked
otherwise, from a loss of their own, the cross entropy of the fused row through the target's head, and the cosine sees their
result without a gradient. Fusions are trained beside the draft and are no part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import losses


class Average(nn.Module):
    """Their mean; nothing is learned."""

    def forward(self, residuals: Tensor) -> Tensor:
        """[N, K, E] to [N, E]."""
        return losses.average_fusion(residuals)


class Last(nn.Module):
    """The last one, as the head reads it; nothing is learned."""

    def forward(self, residuals: Tensor) -> Tensor:
        """[N, K, E] to [N, E]."""
        return residuals[:, -1]


class Concatenation(nn.Module):
    """A linear layer over the residuals side by side; it starts as the average, or where it is to stay as it is, as a
    random semi-orthogonal projection."""

    def __init__(self, count: int, width: int, frozen: bool = False) -> None:
        super().__init__()
        weight = torch.empty(width, count * width)
        if frozen:
            nn.init.orthogonal_(weight)
        else:
            weight.copy_(torch.eye(width).repeat(1, count) / count)
        self.weight = nn.Parameter(weight, requires_grad=not frozen)

    def forward(self, residuals: Tensor) -> Tensor:
        """[N, K, E] to [N, E]."""
        return losses.concatenation_fusion(residuals, self.weight)


class Attention(nn.Module):
    """A weighted mean of the residuals, whose weights the last one asks for; it starts as the average."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width, width))
        self.key = nn.Parameter(torch.empty(width, width))
        nn.init.orthogonal_(self.key)

    def forward(self, residuals: Tensor) -> Tensor:
        """[N, K, E] to [N, E]."""
        return losses.attention_fusion(residuals, self.query, self.key)


def fusion_for(kind: str, loss: str, count: int, width: int) -> nn.Module:
    """A new fusion of `count` residuals of width E, by the values of `--fusion` and `--fusion-loss`."""
    if kind == "concat":
        return Concatenation(count, width, frozen=loss == "none")
    return {"average": Average, "last": Last, "attention": lambda: Attention(width)}[kind]()
