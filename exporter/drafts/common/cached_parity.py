"""Parity of a draft's layer with keys and values of its own: pass by pass, each behind what the passes before left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

Compared = tuple[str, np.ndarray, np.ndarray, np.ndarray]
"""What is compared, the graph's numbers, the reference's, and how far those are from float64."""


class CachedParity:
    """The caches of a graph, and those of the reference, of one layer over the positions of `batch` texts.

    Args:
        batch, count: texts, and positions of each. heads, size: of keys and values.
        placed: positions with axes int64 [axes, batch, count]; None: they count.
    """

    def __init__(
        self, batch: int, count: int, heads: int, size: int, placed: np.ndarray | None = None
    ) -> None:
        counting = np.broadcast_to(np.arange(count, dtype=np.int64), (batch, count))
        self._placed = counting if placed is None else placed
        self._batch, self._heads, self._size, self._capacity = batch, heads, size, count + 5
        # What lies beyond the positions of a pass is hidden, whatever it is.
        cache = np.random.default_rng(5).standard_normal((batch, heads, self._capacity, size), np.float32)
        self._caches = {"key_cache.0": cache, "value_cache.0": cache}
        self.past: list[Tensor | None] = [None, None]
        """Keys and values of the reference."""
        self.off: list[Tensor | None] = [None, None]
        """How far they are from float64."""

    def seen(self, start: int, end: int) -> np.ndarray:
        """What positions start … end − 1 see: bool [end − start, capacity]."""
        return np.arange(self._capacity) <= np.arange(start, end)[:, None]

    def positions(self, start: int, end: int) -> np.ndarray:
        """As a pass over positions start … end − 1 takes them: int64 [batch, end − start], or [axes, …]."""
        return self._placed[..., start:end].copy()

    def inputs(self, start: int, end: int) -> dict[str, np.ndarray]:
        """What a pass over positions start … end − 1 takes beside its hidden states."""
        seen = self.seen(start, end)
        return {
            "positions": self.positions(start, end),
            "write_indices": np.full(self._batch, start, np.int64),
            "attn_mask": np.broadcast_to(seen, (self._batch, 1, *seen.shape)).copy(),
            **self._caches,
        }

    def compared(
        self, outputs: Mapping[str, np.ndarray], expected: Tensor, error: Tensor, width: int
    ) -> Iterator[Compared]:
        """Keys and values after a pass; the next pass stands behind them.

        Args:
            outputs: what the graph gave. expected, error: `side_by_side` of the reference, and its distance from float64;
                `width` numbers of a position come first.
        """
        end, size = expected.shape[1], self._heads * self._size
        for number, kind in enumerate(("key", "value")):
            part = slice(width + number * size, width + (number + 1) * size)
            own, own_error = (
                each[..., part].unflatten(-1, (self._heads, -1)).transpose(1, 2).contiguous()
                for each in (expected, error)
            )
            cache = self._caches[f"{kind}_cache.0"] = outputs[f"updated_{kind}_cache.0"]
            yield f"{kind}s", cache[:, :, :end], own.numpy(), own_error.numpy()
            self.past[number], self.off[number] = own, own_error


def side_by_side(hidden_states: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    """Hidden states [B, T, E] and all keys and values [B, heads, S, D] as [B, S, E + 2 · heads · D], the new ones last: one run of the
    reference gives all three."""
    flat = [each.transpose(1, 2).flatten(2) for each in cache]
    return torch.cat(
        [torch.nn.functional.pad(hidden_states, (0, 0, flat[0].shape[1] - hidden_states.shape[1], 0)), *flat],
        -1,
    )
