"""Greedy speculative cycles as one captured sequence: drafted tokens stay on the device, the host waits once per cycle.

What a later `Engine.program` will do is done by hand here, with what the interface has: `best` of the head bound where
the next `embed` reads its token, `copy` for rows off the alignment, and a capture. Masks and positions of a chain follow
from its start, so the host sends those of all steps ahead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from engines.recording_device import RecordingDevice
from oracle import Oracle, Request
from tiny_bundles import TinyBundle
from vlmexport.runtime.engines.base import DTYPES, View

SLOT = 32
"""int64 values in 256 bytes."""


class ByHand:
    """A Llama bundle of two segments on a device: prefill, then cycles of `drafted` early-exit proposals."""

    def __init__(self, device: RecordingDevice, table: np.ndarray, drafted: int) -> None:
        self.device, self.drafted = device, drafted
        self.capacity, self.size = device.capacity, device.manifest.decoder.hidden_size
        self.caches: dict[str, View] = {}
        for graph in ("segment.0", "segment.1"):
            for value in device.interface(graph).inputs:
                if "_cache." in value.name:
                    shape = (1, value.shape[1], self.capacity, value.shape[3])
                    count = 4 * int(np.prod(shape))
                    buffer = device.allocate(value.name, count, zeroed=True)
                    self.caches[value.name] = buffer.view(shape, "float32")
        self.table = device.constant("embedding_table", table)
        self.zero = self._int64("zero", 1)
        device.write(self.zero, np.zeros(1, np.int64))
        self.length = 0
        self._build()

    def _new(self, name: str, shape: tuple[int, ...], dtype: str) -> View:
        nbytes = int(np.prod(shape)) * DTYPES[dtype].itemsize
        return self.device.allocate(name, nbytes).view(shape, dtype)

    def _int64(self, name: str, count: int) -> View:
        return self._new(name, (count,), "int64")

    def segment(self, graph: str, hidden: View, out: View, mask: View, positions: View, start: View) -> Any:
        """A bound call."""
        caches = {
            v.name: self.caches[v.name] for v in self.device.interface(graph).inputs if "_cache." in v.name
        }
        inputs = {
            "hidden": hidden,
            "attn_mask": mask,
            "positions": positions,
            "write_indices": start,
        } | caches
        updated = {f"updated_{name}": view for name, view in caches.items()}
        return self.device.bind(graph, inputs, {"hidden_out": out} | updated)

    def visible(self, start: int, width: int) -> np.ndarray:
        """Mask [width, capacity] of a chain."""
        return np.arange(self.capacity) <= start + np.arange(width)[:, None]

    def prefill(self, ids: list[int]) -> int:
        """The first token."""
        device, width = self.device, len(ids)
        tokens, start = self._new("prompt", (1, width), "int64"), self._int64("start", 1)
        mask = self._new("prompt_mask", (1, 1, width, self.capacity), "bool")
        positions, row = self._new("prompt_positions", (1, width), "int64"), self._int64("row", 1)
        device.write(tokens, np.array([ids]))
        device.write(start, np.zeros(1, np.int64))
        device.write(mask, self.visible(0, width)[None, None])
        device.write(positions, np.arange(width)[None])
        device.write(row, np.array([width - 1]))
        rows = [self._new(f"prompt_rows.{i}", (1, width, self.size), "float32") for i in range(3)]
        best = self._int64("first", 1)
        device.bind("embed", {"token_ids": tokens, "embedding_table": self.table}, {"hidden": rows[0]}).run()
        for number in range(2):
            graph = f"segment.{number}"
            self.segment(graph, rows[number], rows[number + 1], mask, positions, start).run()
        device.bind("head", {"hidden": rows[2], "row_index": row}, {"best": best}).run()
        self.length = width
        return int(device.read(best)[0])

    def _build(self) -> None:
        device, d, size = self.device, self.drafted, self.size
        count = d + 1
        # One upload of integers: the pending token, then the start (and position) of every step; then a chain's.
        self.control = self._int64("control", (2 + count) * SLOT)
        # One upload of masks, each step's on its own 256 bytes: the steps', then those of all rows together.
        self.stride = -(-self.capacity // 256) * 256
        self.masks = self._new("masks", (count * self.stride + count * self.capacity,), "bool")
        # One download: tokens of the chain, then what the target says after each, then whether that is a number.
        self.result = self._int64("result", 3 * count)

        def slot(view: View, index: int, shape: tuple[int, ...] = (1,)) -> View:
            return view.buffer.view(shape, "int64", index * SLOT)

        tokens, best = self._int64("tokens", (count + 1) * SLOT), self._int64("best", count)
        finite = self._new("finite", (count,), "bool")
        hidden, row = (self._new(name, (1, 1, size), "float32") for name in ("hidden", "row"))
        exits, out = (self._new(name, (1, count, size), "float32") for name in ("exits", "out"))
        index = self._int64("row_index", count)
        device.write(index, np.arange(count))
        calls = [device.copy(slot(tokens, 0), slot(self.control, 0))]
        for i in range(count):
            ids = slot(tokens, i, (1, 1))
            calls.append(
                device.bind("embed", {"token_ids": ids, "embedding_table": self.table}, {"hidden": hidden})
            )
            mask = self.masks.buffer.view((1, 1, 1, self.capacity), "bool", i * self.stride)
            at = slot(self.control, 1 + i)
            calls.append(self.segment("segment.0", hidden, row, mask, slot(self.control, 1 + i, (1, 1)), at))
            calls.append(device.copy(exits.buffer.view((1, 1, size), "float32", i * size), row))
            if i < d:
                head = {"hidden": row, "row_index": self.zero}
                calls.append(device.bind("head", head, {"best": slot(tokens, i + 1)}))
        mask = self.masks.buffer.view((1, 1, count, self.capacity), "bool", count * self.stride)
        positions = slot(self.control, 1 + count, (1, count))
        calls.append(self.segment("segment.1", exits, out, mask, positions, slot(self.control, 1)))
        calls.append(
            device.bind("head", {"hidden": out, "row_index": index}, {"best": best, "finite": finite})
        )
        for i in range(count):
            calls.append(device.copy(self.result.buffer.view((1,), "int64", i), slot(tokens, i)))
        calls.append(device.copy(self.result.buffer.view((count,), "int64", count), best))
        calls.append(device.copy(self.result.buffer.view((count,), "bool", 16 * count), finite))
        device.stream.synchronise()
        with device.capture() as self.captured:
            for call in calls:
                call.run()

    def cycle(self, pending: int) -> list[int]:
        """The tokens after `pending`: what was drafted and holds, and the target's own."""
        device, count, start = self.device, self.drafted + 1, self.length
        control = np.zeros(self.control.shape, np.int64)
        control[0] = pending
        control[SLOT : SLOT * (1 + count) : SLOT] = start + np.arange(count)
        control[SLOT * (1 + count) :][:count] = start + np.arange(count)
        device.write(self.control, control)
        masks = np.zeros(self.masks.shape, bool)
        chain = self.visible(start, count)
        masks[: count * self.stride].reshape(count, self.stride)[:, : self.capacity] = chain
        masks[count * self.stride :] = chain.reshape(-1)
        device.write(self.masks, masks)
        self.captured.launch()
        result = device.read(self.result)
        tokens, best = result[1:count], result[count : 2 * count]
        assert result[2 * count :].view(bool)[:count].all()
        agreed = 0
        while agreed < self.drafted and tokens[agreed] == best[agreed]:
            agreed += 1
        self.length += 1 + agreed
        return [*tokens[:agreed].tolist(), int(best[agreed])]


def captured_cycles(device: RecordingDevice, tiny: TinyBundle, oracle: Oracle) -> None:
    """The tokens of `generate`, with one wait and one launch per cycle, and at most 4 KB to the host."""
    ids = np.random.default_rng(61).integers(3, 200, 9).tolist()
    want = oracle.greedy(Request(tuple(ids)), 40)
    model = ByHand(device, tiny.bundle.tensor("embedding_table"), drafted=3)
    tokens = [model.prefill(ids)]
    cycles = accepted = 0
    allocations = device.allocations
    while len(tokens) < 40:
        before = device.counts.copy()
        made = model.cycle(tokens[-1])
        used = device.counts - before
        assert (used.synchronisations, used.launches, used.enqueues) == (1, 1, 2), used
        assert used.bytes_down <= 4096, used
        tokens += made
        cycles, accepted = cycles + 1, accepted + len(made) - 1
    assert tuple(tokens[:40]) == want
    assert accepted >= 1, "no draft was accepted: the feedback of tokens was not tested"
    assert device.allocations == allocations and cycles >= 10
