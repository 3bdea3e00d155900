"""The target's norm and LM head over hidden states of passes: logits, and the best tokens where the engine's head names
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engines.base import DTYPES, Buffer, Engine, View
from ..engines.buffers import HostBuffer
from .forward_pass import ForwardPass
from .logits import TargetLogits

WIDEST = 8
"""Bytes of the widest value that a head offers per token."""


class HeadOutputs:
    """Binds the graph `head`, and holds the memory of what it gives. Heads of one purpose share theirs."""

    def __init__(self, engine: Engine, vocab_size: int, max_batch: int, max_width: int, max_num_tokens: int):
        """At most `max_num_tokens` tokens per pass."""
        self._engine, self._vocab_size = engine, vocab_size
        self._max_batch, self._max_width = max_batch, max_width
        self._row_index = HostBuffer(engine, "row_index", max_num_tokens, "int64")
        self._in_order = HostBuffer(engine, "row_index.in_order", max_num_tokens, "int64")
        self._in_order.host((max_num_tokens,))[:] = range(max_num_tokens)
        self._in_order.push((max_num_tokens,))
        self._buffers: dict[str, Buffer] = {}
        self._heads: dict[tuple[object, ...], TargetLogits] = {}

    def clear(self) -> None:
        """Forget what is bound."""
        self._heads.clear()

    def row_range(self, count: int) -> View:
        """int64 [count]: 0, 1, …"""
        return self._in_order.view((count,))

    def over_first(self, forward_pass: ForwardPass, num_logits: int) -> TargetLogits:
        """The head over the first hidden states of a pass; nothing is written for it."""
        head = self._over_index(forward_pass, self.row_range(num_logits))
        forward_pass.heads[num_logits] = head
        return head

    def over(self, forward_pass: ForwardPass, row_index: Sequence[int]) -> TargetLogits:
        """The head over the hidden states of a pass that `row_index` names."""
        shape = (len(row_index),)
        self._row_index.host(shape)[:] = row_index
        self._row_index.push(shape)
        return self._over_index(forward_pass, self._row_index.view(shape))

    def bind(
        self, hidden: View, index: View, num_logits: int, purpose: str = "", graph: str = "head"
    ) -> TargetLogits:
        """`head` over those of `hidden` [batch, width, E] that `index` int64 [num_logits] names; heads of one `purpose`
        share their outputs. `graph` made them: it is named where they are not finite."""
        outputs = self._outputs(purpose, num_logits)
        call = self._engine.bind("head", {"hidden": hidden, "row_index": index}, outputs)
        return TargetLogits(self._engine, call, outputs, graph)

    def last_logits(self) -> np.ndarray:
        """A copy of the first logits [V] that the last head without a purpose computed."""
        view = self._buffers["logits"].view((1, self._vocab_size), "float32")
        return np.array(self._engine.read(view)[0])

    def _over_index(self, forward_pass: ForwardPass, index: View) -> TargetLogits:
        """Passes with the same result share their heads."""
        result = forward_pass.result
        key = (result.address, result.shape, index.address, index.shape)
        head = self._heads.get(key)
        if head is None:
            head = self._heads[key] = self.bind(result, index, index.size)
        return head

    def _outputs(self, purpose: str, num_logits: int) -> dict[str, View]:
        """Logits, and what else the engine's head offers (one value per token), one behind the other in one buffer."""
        most = self._max_batch * (1 if purpose else self._max_width)
        unit = max(self._engine.alignment, WIDEST)

        def step(count: int) -> int:
            return -(-count * WIDEST // unit) * unit

        logits = self._buffer(f"{purpose}logits", most * self._vocab_size * DTYPES["float32"].itemsize)
        outputs = {"logits": logits.view((num_logits, self._vocab_size), "float32")}
        others = [value for value in self._engine.interface("head").outputs if value.name != "logits"]
        if others:
            buffer = self._buffer(f"{purpose}answers", step(most) * len(others))
            for place, value in enumerate(others):
                offset = place * step(num_logits) // DTYPES[value.dtype].itemsize
                outputs[value.name] = buffer.view((num_logits,), value.dtype, offset)
        return outputs

    def _buffer(self, name: str, nbytes: int) -> Buffer:
        if name not in self._buffers:
            self._buffers[name] = self._engine.allocate(name, nbytes)
        return self._buffers[name]
