"""Linear attention as a bundle has it: transformers' Gated DeltaNet over a window of rows (`gated_delta.py`).

A layer keeps two things of a sequence. `recurrent_state` holds its first c rows. `recent_rows` are what the layer's projections
made of the rows from c − (kernel − 1) on: the convolution reads those before c, and those from c on, `pending` of them, are
replayed. A pass folds the first rows into the state, as many as it is told. What the target rejects is never folded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import embedding
from transformers.activations import ACT2FN

from .gated_delta import gated_delta_rule, l2_normed
from .hooks import rms_norm

WINDOW = 128
"""Most rows of a window, replayed and own: the inverse of its system takes log₂ of it steps, whatever its length is."""


class StateCache:
    """One layer's recent rows and state; after the layer ran, the updated ones."""

    def __init__(
        self, recent: torch.Tensor, state: torch.Tensor, pending: torch.Tensor, folded: torch.Tensor
    ) -> None:
        """`recent` [B, kernel − 1 + R, C], `state` [B, H, Dk, Dv]; `pending` int64 [B] ≤ R: rows that are replayed; `folded`
        int64 [B]: rows, of them and then of the pass, that the updated state holds."""
        self.recent, self.state, self.pending, self.folded = recent, state, pending, folded

    def extend(self, rows: torch.Tensor, most: int) -> torch.Tensor:
        """The window [B, kernel − 1 + R + W, C] that ends with a pass's own `rows` [B, W, C], where R = `most`; keeps what
        the next pass needs of it."""
        place = torch.arange(self.recent.shape[1])[None]
        # The last pending row stands before the pass's first. Where less than R are pending, the first rows are none.
        old = torch.clamp(place + (self.pending[:, None] - most), min=0)
        window = torch.cat((_rows_at(self.recent, old), rows), 1)
        new = place + (self.folded - self.pending + most)[:, None]
        self.recent = _rows_at(window, torch.clamp(new, max=window.shape[1] - 1))
        return window


def _rows_at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of `rows` [B, N, C] those at `index` int64 [B, M] of each sequence."""
    first = torch.arange(rows.shape[0])[:, None] * rows.shape[1]
    return embedding(first + index, rows.flatten(0, 1))


def gated_delta_net(
    self: Any, hidden_states: torch.Tensor, cache_params: StateCache, **_: Any
) -> torch.Tensor:
    """Forward of transformers' `Qwen3_5GatedDeltaNet` on hidden states [B, W, E], with a `StateCache`."""
    batch, width = hidden_states.shape[:2]
    gate = self.in_proj_z(hidden_states).reshape(batch, width, self.num_v_heads, self.head_v_dim)
    projected = [linear(hidden_states) for linear in (self.in_proj_qkv, self.in_proj_b, self.in_proj_a)]
    before = self.conv_kernel_size - 1
    most = cache_params.recent.shape[1] - before
    window = cache_params.extend(torch.cat(projected, -1), most)
    length = most + width
    mixed, b, a = window.split((self.conv_dim, self.num_v_heads, self.num_v_heads), -1)
    taps = self.conv1d.weight.squeeze(1)  # [C, kernel]
    mixed = sum(taps[:, tap] * mixed[:, tap : tap + length] for tap in range(before + 1))
    query, key, value = ACT2FN[self.activation](mixed).split((self.key_dim, self.key_dim, self.value_dim), -1)

    place = torch.arange(length)[None]
    begin = (most - cache_params.pending)[:, None]
    none = (place < begin)[..., None]
    beta = torch.where(none, 0.0, torch.sigmoid(b[:, before:]))
    pace = softplus(a[:, before:].float() + self.dt_bias)
    decay = torch.where(none, 0.0, pace * (torch.exp(self.A_log.float()) * -1.0))
    groups = self.num_v_heads // self.num_k_heads
    out, cache_params.state = gated_delta_rule(
        l2_normed(_by_head(query[:, most:], self.head_k_dim, groups), self.head_k_dim**-0.5),
        l2_normed(_by_head(key, self.head_k_dim, groups)),
        _by_head(value, self.head_v_dim),
        decay.transpose(1, 2),
        beta.transpose(1, 2),
        cache_params.state,
        place < begin + cache_params.folded[:, None],
        WINDOW,
    )
    normed = self.norm(out.transpose(1, 2), gate)
    return self.out_proj(normed.reshape(batch, width, self.value_dim))


def _by_head(rows: torch.Tensor, size: int, groups: int = 1) -> torch.Tensor:
    """[B, L, heads × size] as [B, heads × groups, L, size]: every head serves that many in a row."""
    batch, length, width = rows.shape
    heads = rows.reshape(batch, length, width // size, size).transpose(1, 2)
    if groups == 1:
        return heads
    shared = heads[:, :, None].expand(batch, width // size, groups, length, size)
    return shared.reshape(batch, width // size * groups, length, size)


def softplus(values: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), for any x."""
    return torch.logsumexp(torch.stack((values, torch.zeros_like(values)), -1), -1)


def gated_norm(self: Any, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Forward of transformers' `Qwen3_5RMSNormGated`: the norm, then the gate."""
    normed = rms_norm(hidden_states, self.weight, float(self.variance_epsilon))
    return normed * ACT2FN[self.activation](gate)
