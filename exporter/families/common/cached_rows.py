"""Transformers' own caches as the graphs have them: a row for every token, or a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ....runtime.graphs.states import RECURRENT_STATE
from ....runtime.graphs.values import CONV_CACHE, KEY_VALUE

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from .parts import DecoderShape


def recording_cache(shape: DecoderShape, config: Any) -> Cache | None:
    """A cache with which a model of this text configuration keeps a row of every token: transformers' own cache of a layer
    that sees a window, or of a convolution, holds no more than that reads. None where the model's own cache does."""
    from transformers import DynamicCache

    if shape.conv_kernel is not None:
        cache = DynamicCache(config=config)
        cache.activate_past_recording()
        return cache
    return None if shape.sliding_window is None else DynamicCache()


def cached_rows(layer: Any) -> dict[str, torch.Tensor]:
    """The rows [B, heads, T, size] of one layer of transformers' cache, by the names that graphs have for them; of linear
    attention its state [B, heads, Dk, Dv]."""
    if any(getattr(layer, "is_recurrent_states_initialized", {}).values()):
        return {RECURRENT_STATE: layer.recurrent_states[0]}
    if hasattr(layer, "conv_states"):
        return {CONV_CACHE: layer.conv_states[0].transpose(1, 2)[:, None]}
    return dict(zip(KEY_VALUE, (layer.keys, layer.values), strict=True))
