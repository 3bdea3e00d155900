"""New keys and values beside the cache: how a pass is prepared, and finished, on an engine that does not update caches
in place.

A graph of the portable lowering reads the caches, takes a mask in two parts, and hands out the keys and values that it
computed (`exporter/lowering/rows.py`). This is the reference in numpy: what a kernel on a device has to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..common.bfloat16 import masked_value
from ..graphs.values import CONV_SLOTS
from .base import View

START = "write_indices"
"""Input: the first slot of every sequence, where the bundle's graph has one."""

NEW_MASKS = {"attn_mask": "new_mask", "sliding_mask": "new_sliding_mask"}
"""Inputs: a mask over the cache → its other part, over the new slots."""


def pass_width(inputs: Mapping[str, View]) -> int:
    """New slots of every sequence in a pass of a graph with caches, which has a mask or slots that say so."""
    widths = {inputs[name].shape[2] for name in NEW_MASKS if name in inputs}
    widths |= {inputs[name].shape[1] for name in (CONV_SLOTS, "source_rows") if name in inputs}
    (width,) = widths
    return width


def new_name(updated: str) -> str:
    """Of the output with the new keys or values: `updated_key_cache.3` → `new_key.3`."""
    return updated.replace("updated_", "new_", 1).replace("_cache", "", 1)


def split_mask(mask: np.ndarray, starts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The parts of a mask [batch, heads, width, cache], boolean or float, whose sequence b writes its keys and values
    from slot `starts[b]` on: the mask over the cache, same shape, which hides those slots and all behind them, and the
    mask over the new slots [batch, heads, width, width]. Copies."""
    before, own = mask.copy(), np.empty((*mask.shape[:3], mask.shape[2]), mask.dtype)
    hidden = False if mask.dtype == np.bool_ else masked_value(mask.dtype)
    for batch_index, start in enumerate(starts):
        own[batch_index] = mask[batch_index, :, :, start : start + mask.shape[2]]
        before[batch_index, :, :, start:] = hidden
    return before, own


def append_kv(cache: np.ndarray, new_kv: np.ndarray, starts: Sequence[int]) -> None:
    """Write `new_kv` [batch, kv_heads, width, head_dim] into `cache` [batch, kv_heads, capacity, head_dim], those of
    sequence b from slot `starts[b]` on. Raises `ValueError` before anything is written where they would leave it."""
    width = new_kv.shape[2]
    if any(not 0 <= start <= cache.shape[2] - width for start in starts):
        raise ValueError(f"{width} rows from slots {list(starts)} on leave a cache of {cache.shape[2]}")
    for batch_index, start in enumerate(starts):
        cache[batch_index, :, start : start + width] = new_kv[batch_index]
