"""Positions of the tokens of a pass: the graph input `positions`, and where text goes on behind a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..bundle.decoder_info import DecoderInfo
from ..engines.base import Engine, View
from ..engines.buffers import HostBuffer
from ..graphs.values import segment_positions
from .forward_pass import ForwardPass


def next_position(positions: np.ndarray) -> int:
    """Where text goes on behind tokens with `positions` int64 [axes, n] (n ≥ 1).

    Behind text one further. Behind a picture or video after its longer side; time, the first of three axes, does not
    count, and may have run ahead of the text that follows a slow video (transformers' `get_rope_index`).
    """
    return int(positions[-2:, -1].max()) + 1


def positions_of_slots(prompt: np.ndarray | None, slots: np.ndarray) -> np.ndarray:
    """Where tokens in `slots` int64 [n] of a sequence stand: int64 [axes, n].

    `prompt` int64 [axes, tokens] are the positions of its prompt; text stands behind it. None: positions count slots,
    [1, n].
    """
    if prompt is None:
        return slots[None]
    count = prompt.shape[1]
    behind = slots + (next_position(prompt) - count)
    return np.where(slots < count, prompt[:, np.minimum(slots, count - 1)], behind)


class Positions:
    """int64 [batch, width], or [3, batch, width] with M-RoPE: the buffer that all passes share, and each sequence's
    offset.

    A token's position is its slot plus the offset of its sequence.
    """

    def __init__(self, engine: Engine, info: DecoderInfo, max_num_tokens: int, capacity: int, max_batch: int):
        """At most `max_num_tokens` tokens per pass, in slots below `capacity`."""
        self._info, self._max_positions = info, info.max_positions
        self._axes = 3 if info.position == "mrope" else 1
        self._buffer = HostBuffer(engine, "positions", self._axes * max_num_tokens, "int64")
        self._slots = np.arange(capacity, dtype=np.int64)
        self._in_order = self._limited(self._slots)
        """Positions of a chain without offset, to slice from."""
        self.offsets = [0] * max_batch
        """Not 0 after images with M-RoPE."""

    def of_slot(self, slot: int, batch_index: int = 0) -> int:
        """Position of the token in `slot` of a sequence whose prompt lies before it."""
        return slot + self.offsets[batch_index]

    def reset(self) -> None:
        """Forget all offsets."""
        self.offsets[:] = [0] * len(self.offsets)

    def attach(self, forward_pass: ForwardPass, first_layer: int, attention: Sequence[int]) -> View | None:
        """What a graph reads that begins at `first_layer` and has the caches of the layers `attention`, which the pass
        fills then; None if it reads none."""
        shape = segment_positions(self._info, first_layer, attention)
        if shape is None:
            return None
        batch, width, flat = forward_pass.batch, forward_pass.width, len(shape) == 2
        shape = (batch, width) if flat else (self._axes, batch, width)
        if forward_pass.positions is None:
            host = self._buffer.host(shape)
            forward_pass.positions = host[:, None] if flat else host.transpose(1, 0, 2)
            forward_pass.pushes.append((self._buffer, shape))
        return self._buffer.view(shape)

    def view(self, forward_pass: ForwardPass) -> View | None:
        """What the pass reads; None: nothing."""
        if forward_pass.positions is None:
            return None
        axes = (self._axes,) if self._axes > 1 else ()
        return self._buffer.view((*axes, forward_pass.batch, forward_pass.width))

    def write_prompt(self, forward_pass: ForwardPass, start: int, positions: np.ndarray | None) -> None:
        """Of the tokens of a prompt from slot `start` on: `positions` [axes, n ≤ width], by default their slots."""
        if forward_pass.positions is None:
            return
        width = forward_pass.width
        if positions is None:
            forward_pass.positions[0] = self._limited(start + np.arange(width))
        else:
            padding = (0, 0), (0, width - positions.shape[1])
            forward_pass.positions[0] = np.pad(positions, padding, mode="edge")

    def write_chain(self, positions: np.ndarray, batch_index: int, start: int, width: int) -> None:
        """Of `width` tokens from slot `start` on of a sequence, into `positions` [batch, axes, width]."""
        offset = self.offsets[batch_index]
        if offset:
            positions[batch_index] = self._limited(self._slots[:width] + (start + offset))
        else:
            positions[batch_index] = self._in_order[start : start + width]

    def write_nodes(
        self, forward_pass: ForwardPass, batch_index: int, start: int, depths: Sequence[int]
    ) -> None:
        """Of nodes of a tree whose root takes slot `start` of a sequence; padding stands like the root."""
        if forward_pass.positions is not None:
            padded = np.zeros(forward_pass.width, np.int64)
            padded[: len(depths)] = depths
            forward_pass.positions[batch_index] = self._limited(start + self.offsets[batch_index] + padded)

    def _limited(self, positions: np.ndarray) -> np.ndarray:
        """Positions of padding and scratch tokens may lie beyond a table of learned ones: its last entry will do."""
        most = self._max_positions
        return positions if most is None else np.minimum(positions, most - 1)
