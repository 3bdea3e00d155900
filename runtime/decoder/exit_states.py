"""Hidden states inside the decoder: those that the trunk leaves for the tail, and those that drafts read.

Exit states lie step after step, [max_width, batch, E] after every cut, each step at an address that the engine can bind.
Taps are the hidden states of the last pass, [batch, width, E], after the layers that a draft reads.
"""

from __future__ import annotations

from ..bundle.manifest import Manifest
from ..engines.base import DTYPES, Buffer, Call, Engine, View
from .forward_pass import ForwardPass


def tapped_layers(manifest: Manifest) -> list[int]:
    """Layers after which a pass leaves its hidden states: `taps`, and those of drafts that attend over them."""
    layers = {layer for draft in manifest.drafts for layer in draft.options.tap_layers}
    attending = {draft.layer for draft in manifest.drafts if draft.name in manifest.attending}
    return sorted(layers | {layer for layer in attending if layer})


class ExitStates:
    """Buffers of exit states and taps, and the copies between them and the hidden states of passes."""

    def __init__(self, engine: Engine, manifest: Manifest, dtype: str, max_batch: int, max_num_tokens: int):
        """`dtype` of hidden states between graphs; at most `max_num_tokens` of them per pass."""
        self._engine, self._dtype, self._cuts = engine, dtype, manifest.decoder.cuts
        self._size, self._item = manifest.decoder.hidden_size, DTYPES[dtype].itemsize
        nbytes = manifest.limits.max_width * self._stride(max_batch) * self._item
        self.buffers = {
            cut: engine.allocate(f"exit_hidden.{cut}", nbytes) for cut in range(1, len(manifest.segments))
        }
        """Exit states after segment `cut` − 1, by cut."""
        self.taps: dict[int, Buffer] = {
            self._cuts.index(layer): engine.allocate(
                f"tap.{layer}", max_num_tokens * self._size * self._item, zeroed=True
            )
            for layer in tapped_layers(manifest)
        }
        """Hidden states of the last pass after the layers of a cut, by cut."""
        self.last_tail: tuple[int, int, int] = (-1, 0, 0)
        """(pass number, cut, count) of the last tail: its exit states are no taps until a draft asks for them."""

    def view(self, cut: int, batch: int, width: int = 1, step: int = 0) -> View:
        """Hidden states [batch, width, E] after segment `cut` − 1 from those of `step` on."""
        shape = (batch, width, self._size)
        return self.buffers[cut].view(shape, self._dtype, step * self._stride(batch))

    def tap(self, cut: int, batch: int, width: int) -> View | None:
        """Where a pass leaves its hidden states [batch, width, E] for drafts; None: no draft reads them."""
        buffer = self.taps.get(cut)
        return None if buffer is None else buffer.view((batch, width, self._size), self._dtype)

    def is_contiguous(self, batch: int) -> bool:
        """Whether hidden states of a step follow those of the step before, as a pass over [batch, width] reads them."""
        return self._stride(batch) == self._size

    def gather(self, forward_pass: ForwardPass, cut: int, count: int) -> None:
        """The first `count` exit states of every sequence, step after step, into the input [batch, width, E] of a tail;
        those behind them repeat the last one."""
        hidden, batch = forward_pass.hidden, forward_pass.batch
        if hidden is None:  # it reads them where they lie
            return
        if not self._engine.host_memory:
            for copy in self.copies(forward_pass, cut, count):
                copy.run()
            return
        stride, size = self._stride(batch), self._size
        steps = self._engine.read(self.buffers[cut].view((count, stride), self._dtype))
        hidden[:, :count] = steps[:, : batch * size].reshape(count, batch, size).transpose(1, 0, 2)
        hidden[:, count:] = hidden[:, count - 1 : count]

    def copies(self, forward_pass: ForwardPass, cut: int, count: int) -> list[Call]:
        """The calls of `gather`."""
        if forward_pass.input is None:
            return []
        return self._copies(forward_pass.input.buffer, cut, forward_pass.batch, forward_pass.width, count)

    def copies_of_nodes(self, cut: int, step: int, hidden_states: View, node: int) -> list[Call]:
        """What makes exit states of `step` of those of number `node` in `hidden_states` [batch, width, E], which left
        segment `cut` − 1."""
        (batch, width, size), stride = hidden_states.shape, self._stride(hidden_states.shape[0])
        return [
            self._engine.copy(
                self.buffers[cut].view((1, 1, size), self._dtype, step * stride + batch_index * size),
                hidden_states.buffer.view(
                    (1, 1, size), self._dtype, hidden_states.offset + (batch_index * width + node) * size
                ),
            )
            for batch_index in range(batch)
        ]

    def hidden_after(self, layer: int, last: ForwardPass, pass_number: int) -> View:
        """Hidden states [batch, width, E] of the pass `last`, the one with this number, after a tapped layer. After a
        tail those of the trunk are brought there first."""
        number, cut, count = self.last_tail
        if number == pass_number:
            self.last_tail = (-1, 0, 0)
            for tap, buffer in self.taps.items():
                if tap <= cut:
                    for copy in self._copies(buffer, tap, last.batch, last.width, count):
                        copy.run()
        return self.taps[self._cuts.index(layer)].view(last.result.shape, self._dtype)

    def _stride(self, batch: int) -> int:
        """Elements from the hidden states of a step to those of the next one."""
        nbytes, alignment = batch * self._size * self._item, self._engine.alignment
        return -(-nbytes // alignment) * alignment // self._item

    def _copies(self, target: Buffer, cut: int, batch: int, width: int, count: int) -> list[Call]:
        size, stride = self._size, self._stride(batch)
        return [
            self._engine.copy(
                target.view((1, 1, size), self._dtype, (batch_index * width + place) * size),
                self.buffers[cut].view(
                    (1, 1, size), self._dtype, min(place, count - 1) * stride + batch_index * size
                ),
            )
            for batch_index in range(batch)
            for place in range(width)
        ]
