"""What drafts whose layers attend share: their cache outside of a graph, and the angles of their positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....runtime.common.errors import OptionError


def rotary_angles(
    positions: Tensor, head_dim: int, base: float, axes: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """(cos, sin) [B, T, head_dim / 2] float32 of positions int64 [B, T], or with `axes` of positions int64 [3, B, T]: angle i
    turns with the axis `axes[i]` (`mrope_axes`)."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    if axes is None:
        placed = positions[..., None]
    else:
        placed = positions.index_select(0, torch.tensor(axes, device=positions.device)).permute(1, 2, 0)
    angles = placed.to(torch.float32) * base**-powers
    return angles.cos(), angles.sin()


def mrope_axes(sections: Sequence[int], interleaved: bool, angles: int) -> list[int]:
    """Which axis of M-RoPE's positions (time, height, width) each of a head's angles turns with.

    `sections` counts angles by axis. They lie one behind the other (Qwen2-VL, arXiv 2409.12191), or `interleaved`: every third
    angle is height's, and every third width's, as far as their sections go, and all others are time's (Qwen3-VL, arXiv 2511.21631).
    """
    if interleaved:
        return [i % 3 if i % 3 and i < 3 * sections[i % 3] else 0 for i in range(angles)]
    return [axis for axis, count in enumerate(sections) for _ in range(count)]


def checked_sections(kind: str, sections: Any) -> tuple[int, ...]:
    """Counts of angles by axis (`mrope_axes`); OptionError, which begins with `kind`, unless they are three."""
    known = isinstance(sections, list | tuple) and len(sections) == 3
    if not known or not all(type(count) is int and 0 <= count <= 8192 for count in sections):
        raise OptionError(f"{kind}: mrope_section {sections!r:.80} is not three numbers")
    return tuple(sections)


def run_layer(
    layer: nn.Module,
    hidden_states: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor,
    past: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """What a decoder layer of transformers gives, [B, T, E], and the keys and values of all S + T; `angles` are (cos, sin) of
    half of what turns of a head, `mask` is bool [B, 1, T, S + T] (True: visible), `past` keys and values [B, heads, S, D]."""
    cos, sin = (torch.cat([half, half], -1).to(hidden_states.dtype) for half in angles)
    cache = Joined(past)
    out = layer(hidden_states, attention_mask=mask, position_embeddings=(cos, sin), past_key_values=cache)
    assert cache.key_values is not None
    return out, cache.key_values


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
