"""Angles of M-RoPE, written a second time: as AngelSlim's drafts have them, and as transformers' Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def angles_of(config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) [B, T, head_dim / 2] of positions int64 [3, B, T], for an `EagleConfig` with axes."""
    made = alternating if config.mrope_interleaved else in_sections
    angles = made(positions, config.mrope_section, config.head_dim, config.rope_theta)
    return angles.cos(), angles.sin()


def alternating(positions: Tensor, sections: Sequence[int], head_dim: int, theta: float) -> Tensor:
    """Time's angles, with slices of the others written over them (github.com/Tencent/AngelSlim, `MRotaryEmbedding`)."""
    by_axis = turned(positions, head_dim, theta)
    found = by_axis[0].clone()
    for axis in (1, 2):
        place = slice(axis, sections[axis] * 3, 3)
        found[..., place] = by_axis[axis][..., place]
    return found


def in_sections(positions: Tensor, sections: Sequence[int], head_dim: int, theta: float) -> Tensor:
    """One axis after the other (transformers, `apply_multimodal_rotary_pos_emb`)."""
    parts = turned(positions, head_dim, theta).split(list(sections), -1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], -1)


def turned(positions: Tensor, head_dim: int, theta: float) -> Tensor:
    """Every axis with all frequencies: float32 [3, B, T, head_dim / 2]."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    return torch.einsum("abt,f->abtf", positions.float(), frequencies)
