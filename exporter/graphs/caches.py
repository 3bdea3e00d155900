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
