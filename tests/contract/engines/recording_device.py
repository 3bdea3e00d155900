"""A device that is not there: own addresses, own memory, every rule of the interface checked on every bind and run.

It stands for TensorRT: the cache is frozen to the capacity, updated caches alias their inputs, everything the host
knows came through `read`. Results come from the PyTorch reference, which computes on this device's private memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from vlmexport.runtime.engines.base import DTYPES, Buffer, View

from . import memory
from .torch_reference import TorchReference

PAGE = 512
MASKED = -1e4
"""A float mask below this hides a row; a relative bias never reaches it."""


def _bytes(view: View) -> int:
    return view.size * DTYPES[view.dtype].itemsize


def _overlap(one: View, other: View) -> bool:
    return one.address < other.address + _bytes(other) and other.address < one.address + _bytes(one)


@dataclass
class Recorded:
    """One run: which graph, with which widths and addresses."""

    graph: str
    width: int
    write_indices: tuple[int, ...]
    addresses: dict[str, int] = field(repr=False)


class RecordingDevice:
    """See the module. Violations raise AssertionError where they happen; `runs` lists what was executed."""

    name = "recording-device"
    static_cache = True
    host_memory = False

    def __init__(self, manifest: Any, model: Any, imitations: Mapping[str, Any] | None = None) -> None:
        self.manifest = manifest
        self.capacity = manifest.limits.max_length + manifest.limits.max_width
        self.runs: list[Recorded] = []
        self.transfers = {"write": 0, "read": 0}
        self._reference = TorchReference(manifest, model, imitations)
        self._next = 1 << 32
        self._memory: dict[int, Buffer] = {}
        self._written: dict[int, np.ndarray] = {}  # K/V address → rows ever written, [batch, capacity]

    # --- memory ---

    def allocate(self, name: str, shape: tuple[int, ...], dtype: str) -> Buffer:
        shape = tuple(int(n) for n in shape)
        buffer = Buffer(name, shape, dtype, self._next)  # no data: the host cannot look into it
        self._next += -(-buffer.nbytes // PAGE) * PAGE + PAGE
        self._memory[buffer.address] = memory.allocate(name, shape, dtype)
        return buffer

    def view(self, buffer: Buffer, shape: tuple[int, ...], offset: int = 0) -> View:
        self._own(buffer)
        return View(buffer, tuple(int(n) for n in shape), int(offset)).check()

    def constant(self, name: str, array: np.ndarray) -> View:
        buffer = self.allocate(name, array.shape, array.dtype.name)
        self._memory[buffer.address].data[...] = array.reshape(-1)
        return self.view(buffer, array.shape)

    def write(self, view: View, array: np.ndarray) -> None:
        array = np.asarray(array)
        assert array.dtype == DTYPES[view.dtype], f"{view.buffer.name}: wrote {array.dtype} into {view.dtype}"
        self.transfers["write"] += 1
        assert array.shape == view.shape, f"{view.buffer.name}: wrote {array.shape} into {view.shape}"
        memory.array(self._host(view))[...] = array

    def read(self, view: View) -> np.ndarray:
        self.transfers["read"] += 1
        copy = memory.array(self._host(view)).copy()
        copy.flags.writeable = False  # changing what was read does not reach the device
        return copy

    @property
    def allocations(self) -> int:
        """How many buffers were allocated so far."""
        return len(self._memory)

    # --- graphs ---

    def bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> _Call:
        info = self.manifest.graphs[graph]
        for what, declared, given in (("input", info.inputs, inputs), ("output", info.outputs, outputs)):
            names = {value.name for value in declared}
            assert names == set(given), (
                f"{graph}: {what}s missing {sorted(names - set(given))}, unknown {sorted(set(given) - names)}"
            )
        sizes: dict[str, int] = {}
        for value, view in [(v, inputs[v.name]) for v in info.inputs] + [
            (v, outputs[v.name]) for v in info.outputs
        ]:
            self._own(view.buffer)
            assert view.dtype == value.dtype, f"{graph}: {value.name} is {value.dtype}, bound {view.dtype}"
            assert len(view.shape) == len(value.shape), (
                f"{graph}: {value.name} {value.shape}, bound {view.shape}"
            )
            for dimension, size in zip(value.shape, view.shape, strict=True):
                want = sizes.setdefault(dimension, size) if isinstance(dimension, str) else dimension
                assert want == size, (
                    f"{graph}: {value.name} is {value.shape}, bound {view.shape}, {dimension} = {want}"
                )
        self._check_limits(graph, sizes)
        self._check_aliasing(graph, inputs, outputs)
        return _Call(self, graph, dict(inputs), dict(outputs), sizes)

    def _check_limits(self, graph: str, sizes: Mapping[str, int]) -> None:
        limits = self.manifest.limits
        if "cache" in sizes:
            assert sizes["cache"] == self.capacity, (
                f"{graph}: bound {sizes['cache']} cache rows; an engine with static_cache needs all {self.capacity}"
            )
        assert sizes.get("batch", 1) <= limits.max_batch or graph in ("vision", "encoder", "cross_kv"), (
            f"{graph}: batch {sizes['batch']} above {limits.max_batch}"
        )

    def _check_aliasing(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> None:
        caches = {
            name: view for name, view in inputs.items() if name.startswith(("key_cache.", "value_cache."))
        }
        for name, cache in caches.items():
            updated = outputs[f"updated_{name}"]
            assert updated.address == cache.address and updated.shape == cache.shape, (
                f"{graph}: updated_{name} at {updated.address:#x} does not alias {name} at {cache.address:#x}"
            )
            assert cache.offset == 0, f"{graph}: {name} does not start at its buffer"
        plain = [(n, v) for n, v in outputs.items() if not n.startswith("updated_")]
        others = [*caches.items(), *((n, v) for n, v in inputs.items() if n not in caches)]
        for index, (name, view) in enumerate(plain):
            for other, second in plain[index + 1 :] + others:
                assert not _overlap(view, second), f"{graph}: output {name} overlaps {other}"
        names = list(caches.items())
        for index, (name, view) in enumerate(names):
            for other, second in others[len(caches) :] + names[index + 1 :]:
                assert not _overlap(view, second), f"{graph}: {name} overlaps {other}"

    def load(self, *graphs: str) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to close."""

    # --- private ---

    def _own(self, buffer: Buffer) -> None:
        assert buffer.data is None and buffer.address in self._memory, f"{buffer!r} is not of this device"

    def _host(self, view: View) -> View:
        self._own(view.buffer)
        return View(self._memory[view.buffer.address], view.shape, view.offset).check()

    def _rows(self, cache: View) -> np.ndarray:
        sequences = cache.buffer.shape[0]
        return self._written.setdefault(cache.address, np.zeros((sequences, self.capacity), bool))


class _Call:
    def __init__(
        self, device: RecordingDevice, graph: str, inputs: dict[str, View], outputs: dict[str, View],
        sizes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self._device, self._graph, self._inputs, self._outputs = device, graph, inputs, outputs
        self._width = sizes.get("width", 0)
        self._addresses = {name: view.address for name, view in (inputs | outputs).items()}
        host_inputs = {name: device._host(view) for name, view in inputs.items()}
        host_outputs = {name: device._host(view) for name, view in outputs.items()}
        self._compute = device._reference.bind(graph, host_inputs, host_outputs)
        self._caches = {n: v for n, v in inputs.items() if n.startswith(("key_cache.", "value_cache."))}

    def _value(self, name: str) -> np.ndarray:
        return memory.array(self._device._host(self._inputs[name]))

    def run(self) -> None:
        device, graph = self._device, self._graph
        now = {name: view.address for name, view in (self._inputs | self._outputs).items()}
        assert now == self._addresses, f"{graph}: addresses moved since bind"
        starts: tuple[int, ...] = ()
        if "write_indices" in self._inputs:
            starts = tuple(self._value("write_indices").tolist())
            for sequence, start in enumerate(starts):
                assert start >= 0 and start + self._width <= device.capacity, (
                    f"{graph}: sequence {sequence} writes rows {start}..{start + self._width} of {device.capacity}"
                )
        if self._graph == "commit":
            self._check_sources()
        if "row_index" in self._inputs:
            rows, index = prod(self._inputs["hidden"].shape[:2]), self._value("row_index")
            assert index.size == 0 or (index.min() >= 0 and index.max() < rows), (
                f"{graph}: row_index {index} of {rows}"
            )
        if "token_ids" in self._inputs:
            ids = self._value("token_ids")
            assert ids.min() >= 0 and ids.max() < self._inputs["embedding_table"].shape[0], (
                f"{graph}: token ids {ids}"
            )
        self._mark(starts)
        if "attn_mask" in self._inputs:
            self._check_visible()
        device.runs.append(Recorded(graph, self._width, starts, self._addresses))
        self._compute.run()

    def _mark(self, starts: tuple[int, ...]) -> None:
        for cache in self._caches.values():
            rows = self._device._rows(cache)
            for sequence, start in enumerate(starts):
                rows[sequence, start : start + self._width] = True

    def _check_visible(self) -> None:
        mask = self._value("attn_mask")
        visible = mask if mask.dtype == bool else mask > MASKED
        seen = visible.any(axis=(1, 2))  # [batch, cache]
        for name, cache in self._caches.items():
            unwritten = seen & ~self._device._rows(cache)[: len(seen)]
            assert not unwritten.any(), (
                f"{self._graph}: {name} shows never-written rows {np.argwhere(unwritten)[:4].tolist()}"
            )

    def _check_sources(self) -> None:
        source = self._value("source_rows")
        assert source.min() >= 0 and source.max() < self._device.capacity, f"commit: source rows {source}"
        for name, cache in self._caches.items():
            written = np.take_along_axis(self._device._rows(cache)[: len(source)], source, axis=1)
            assert written.all(), f"commit: {name} copies never-written rows of {source}"
