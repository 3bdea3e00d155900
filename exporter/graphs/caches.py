"""Stand-ins for transformers' caches while a decoder layer is traced: one layer, updated at `write_indices`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import EncoderDecoderCache

from .hooks import kv_update


class LayerCache:
    """One layer's self-attention keys and values [batch, heads, cache, D]; after the layer ran, the updated ones."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, write_indices: torch.Tensor) -> None:
        self.keys, self.values, self.write_indices = keys, values, write_indices

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple:
        """Writes new entries [batch, heads, width, D]; all entries come back, as from transformers' caches."""
        self.keys = kv_update(self.keys, keys, self.write_indices)
        self.values = kv_update(self.values, values, self.write_indices)
        return self.keys, self.values

    def get_seq_length(self, *_: Any) -> int:
        """Positions come from a graph input, never from a length."""
        return 0


class ConvCache:
    """One layer's rows [batch, 1, cache, C] that a causal convolution reads; after the layer ran, the updated ones.

    `slots` int64 [batch, width, kernel − 1] are those of the tokens before each token on its way, the nearest last; −1
    where there is none.
    """

    def __init__(self, rows: torch.Tensor, write_indices: torch.Tensor, slots: torch.Tensor) -> None:
        self.rows, self.write_indices, self.slots = rows, write_indices, slots

    def windows(self, new: torch.Tensor) -> list[torch.Tensor]:
        """Writes new rows [batch, width, C]; what the convolution reads for each token, its own row last: `kernel` times
        [batch, width, C], zero before the sequence."""
        batch, _, size = new.shape
        kernel = self.slots.shape[2]
        self.rows = kv_update(self.rows, new[:, None], self.write_indices)
        index = self.slots.clamp(min=0).view(batch, 1, -1, 1).expand(-1, 1, -1, size)
        taken = self.rows.gather(2, index).view(batch, -1, kernel, size)
        missing = (self.slots < 0)[..., None]
        before = torch.where(missing, torch.zeros((), dtype=new.dtype, device=new.device), taken)
        return [*before.unbind(2), new]

    def convolved(self, new: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """What a depthwise convolution of `weight` [C, 1, kernel] and `bias` [C] makes of new rows [batch, width, C], and of
        those before them: products and sums, which are few enough to be cheaper than a convolution of one column."""
        parts = [rows * weight[:, 0, place] for place, rows in enumerate(self.windows(new))]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total if bias is None else total + bias


class _Always(dict):
    def get(self, *_: Any) -> bool:
        return True


class _Layers:
    """Cross-attention's cache: its keys and values are there already, whatever the layer's index."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values, self.layers = keys, values, self

    def __getitem__(self, _: int) -> _Layers:
        return self


class CrossedLayerCache(EncoderDecoderCache):
    """`own` for self-attention, and given keys and values [batch, heads, source, D] for cross-attention."""

    def __init__(self, own: LayerCache, cross_keys: torch.Tensor, cross_values: torch.Tensor) -> None:
        # no super().__init__: it wants transformers' own caches
        self.self_attention_cache = own  # type: ignore[assignment]
        self.cross_attention_cache = _Layers(cross_keys, cross_values)  # type: ignore[assignment]
        self.is_updated = _Always()

    def get_seq_length(self, *_: Any) -> int:
        """As in `LayerCache`."""
        return 0
