"""What drafts whose layers attend share: their cache outside of a graph, and the angles of their positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_angles(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """(cos, sin) [B, T, head_dim / 2] float32 of positions int64 [B, T]."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].to(torch.float32) * base**-powers
    return angles.cos(), angles.sin()


class Joined:
    """A cache as a layer of transformers asks for one: `past` keys and values [B, heads, S, D] before the new ones."""

    def __init__(self, past: tuple[Tensor, Tensor] | None = None) -> None:
        self.key_values = past

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, the new ones last."""
        if self.key_values is not None:
            keys, values = (
                torch.cat([old, new], 2) for old, new in zip(self.key_values, (keys, values), strict=True)
            )
        self.key_values = keys, values
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Positions are given, never counted."""
        return 0
