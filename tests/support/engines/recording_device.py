"""A device that is not there: own addresses, own memory, its own time; every rule of the interface is checked.

Calls, copies and transfers are queued and done when the stream is synchronised, which only `read` does. `RecordingDevice`
stands for TensorRT: the cache is frozen to the capacity, addresses are aligned, calls can be captured and replayed;
`GrowingDevice` stands for a CUDA provider, which binds caches of any length. What a graph computes comes from another
engine, which works on this device's private memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from vlmexport.runtime.bundle.manifest import GraphInfo, ValueInfo
from vlmexport.runtime.engines.base import DTYPES, Buffer, Call, Engine, Program, View
from vlmexport.runtime.graphs.on_device import CHANGING
from vlmexport.runtime.graphs.values import CONV_CACHE, CONV_SLOTS, MASKS

from .device_memory import DEFINED, GARBAGE, WRITTEN, DeviceMemory
from .stream import Captured, Context, Counts, Stream

MASKED = -1e4
"""A float mask below this hides a row; a relative bias never reaches it."""

EXTRA = {"best": "int64", "finite": "bool"}
"""What the head of a GPU engine offers beside `logits`, one value per row: the first best token, and whether its logit
is a number."""


@dataclass
class Recorded:
    """One run: which graph, with which widths and addresses."""

    graph: str
    width: int
    write_indices: tuple[int, ...]
    addresses: dict[str, int] = field(repr=False)


class RecordingDevice(Engine):
    """See the module. Violations raise AssertionError, those of queued work when it is done; `runs` lists what was
    executed, `counts` what it took. `backend` computes: any engine that binds memory of the host."""

    name = "recording-device"
    static_cache = True
    alignment = 256

    def __init__(self, manifest: Any, backend: Any) -> None:
        super().__init__(manifest.graphs)
        self.manifest, self.backend = manifest, backend
        self.capacity = manifest.limits.max_length + manifest.limits.max_width
        self.runs: list[Recorded] = []
        self.memory, self.stream = DeviceMemory(), Stream()
        self._interfaces: dict[str, GraphInfo] = {}
        self._calls: dict[tuple[Any, ...], _Call] = {}
        self._spares: dict[tuple[str, str], Buffer] = {}

    @property
    def counts(self) -> Counts:
        """Synchronisations, enqueues, launches and bytes so far."""
        return self.stream.counts

    @property
    def allocations(self) -> int:
        """How many buffers were allocated so far."""
        return len(self.memory)

    def interface(self, graph: str) -> GraphInfo:
        found = self._interfaces.get(graph)
        if found is None:
            found = self.backend.interface(graph)
            if found.role in ("head", *CHANGING):
                rows = [next(value for value in found.outputs if value.name == "logits").shape[0]]
                extra = [ValueInfo(name=name, dtype=dtype, shape=rows) for name, dtype in EXTRA.items()]
                found = replace(found, outputs=[*found.outputs, *extra])
            self._interfaces[graph] = found
        return found

    def load(self, *graphs: str) -> None:
        self.backend.load(*graphs)

    def renewed(self) -> RecordingDevice:
        """A device with nothing in its memory and its queue, on the graphs that the backend has loaded."""
        return type(self)(self.manifest, self.backend)

    def settle(self) -> None:
        """Do what is queued; not counted."""
        self.stream.drain()

    # --- memory ---

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        self.stream.outside_a_capture("allocating")
        return self.memory.allocate(name, nbytes, zeroed)

    def write(self, view: View, array: np.ndarray) -> None:
        """Transfers when the queue gets there: what the host put into `array` meanwhile would arrive instead."""
        array = np.asarray(array)
        what = view.buffer.name
        assert array.dtype == DTYPES[view.dtype], f"{what}: wrote {array.dtype} into {view.dtype}"
        assert array.shape == view.shape, f"{what}: wrote {array.shape} into {view.shape}"
        target, state = self.memory.array(view), self.memory.state(view)
        before = array.tobytes()

        def transfer() -> None:
            assert array.tobytes() == before, f"{what}: its staging memory was used again before the transfer"
            target[...] = array
            state[...] = WRITTEN

        self.stream.enqueue(transfer, array.nbytes)

    def read(self, view: View) -> np.ndarray:
        """Waits for the queue; the copy cannot be written, for that would not reach the device."""
        source = self.memory.array(view)
        self.stream.synchronise()
        copy = source.copy()
        copy.flags.writeable = False
        self.counts.bytes_down += copy.nbytes
        return copy

    def program(self, calls: Sequence[Call], upload: View, download: View) -> Program:
        return _Captured(self, calls, upload, download)

    def _copy(self, target: View, source: View) -> Call:
        assert not _overlap(target, source), (
            f"a copy from {source.buffer.name} to {target.buffer.name} overlaps"
        )
        self.memory.private(target)
        self.memory.private(source)
        return _Copy(self, target, source)

    # --- captured sequences, and what a test does to the memory ---

    def capture(self) -> AbstractContextManager[Captured]:
        """Calls and copies that are run inside are kept, to be launched together and again."""
        return self.stream.capture()

    def spoil(self, cache: View, lengths: list[int]) -> None:
        """Queue this: whatever was written to `cache` [batch, heads, rows, D] in the rows from `lengths[b]` on is
        garbage and counts as never written."""
        values, state = self.memory.array(cache), self.memory.state(cache)

        def work() -> None:
            for sequence, length in enumerate(lengths):
                stale = state[sequence, :, length:, :, 0] == WRITTEN
                values[sequence, :, length:][stale] = GARBAGE
                state[sequence, :, length:][stale] = DEFINED

        self.stream.queue.append(work)

    # --- graphs ---

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> _Call:
        self.stream.outside_a_capture("binding")
        info = self.interface(graph)
        sizes = self._sizes(graph, info, inputs, outputs)
        bound = dict(outputs)
        for value in info.outputs:
            if value.name not in bound:  # every output of a plan needs an address
                bound[value.name] = self._spare(graph, value, sizes)
        self._check_limits(graph, sizes)
        self._check_aliasing(graph, inputs, bound)
        key = (graph, *((name, view.address, view.shape) for name, view in {**inputs, **bound}.items()))
        call = self._calls.get(key)
        if call is None:
            context = self._context(graph, key)
            call = self._calls[key] = _Call(self, graph, context, dict(inputs), bound, sizes.get("width", 0))
        return call

    def _context(self, graph: str, key: tuple[Any, ...]) -> Context:
        """Each bound call has an execution context of its own."""
        return Context(graph)

    def _sizes(
        self, graph: str, info: GraphInfo, inputs: Mapping[str, View], outputs: Mapping[str, View]
    ) -> dict[str, int]:
        """What every symbolic dimension is; refuses shapes and dtypes that do not fit the interface."""
        sizes: dict[str, int] = {}
        pairs = [(value, inputs[value.name]) for value in info.inputs]
        pairs += [(value, outputs[value.name]) for value in info.outputs if value.name in outputs]
        for value, view in pairs:
            self.memory.private(view)
            assert view.dtype == value.dtype, f"{graph}: {value.name} is {value.dtype}, bound {view.dtype}"
            assert len(view.shape) == len(value.shape), (
                f"{graph}: {value.name} {value.shape}, bound {view.shape}"
            )
            for dimension, size in zip(value.shape, view.shape, strict=True):
                want = sizes.setdefault(dimension, size) if isinstance(dimension, str) else dimension
                assert want == size, (
                    f"{graph}: {value.name} is {value.shape}, bound {view.shape}, {dimension} = {want}"
                )
        return sizes

    def _spare(self, graph: str, value: ValueInfo, sizes: Mapping[str, int]) -> View:
        """Memory for an output that nobody reads."""
        shape = tuple(sizes[size] if isinstance(size, str) else size for size in value.shape)
        nbytes = prod(shape) * DTYPES[value.dtype].itemsize
        buffer = self._spares.get((graph, value.name))
        if buffer is None or buffer.nbytes < nbytes:
            name = f"{graph}.{value.name}.unread"
            buffer = self._spares[graph, value.name] = self.allocate(name, nbytes)
        return buffer.view(shape, value.dtype)

    def _check_limits(self, graph: str, sizes: Mapping[str, int]) -> None:
        if "cache" not in sizes:
            return
        if self.static_cache:
            assert sizes["cache"] == self.capacity, (
                f"{graph}: bound {sizes['cache']} cache rows; an engine with static_cache needs all {self.capacity}"
            )
        assert sizes["cache"] <= self.capacity, (
            f"{graph}: bound {sizes['cache']} cache rows of {self.capacity}"
        )
        most = self.manifest.limits.max_batch
        assert sizes.get("batch", 1) <= most, f"{graph}: batch {sizes['batch']} above {most}"

    def _check_aliasing(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> None:
        caches = _caches(inputs)
        for name, cache in caches.items():
            updated = outputs[f"updated_{name}"]
            assert updated.address == cache.address and updated.shape == cache.shape, (
                f"{graph}: updated_{name} at {updated.address:#x} does not alias {name} at {cache.address:#x}"
            )
            assert cache.offset % max(1, prod(cache.shape[1:])) == 0, (
                f"{graph}: {name} does not start at a sequence of its buffer"
            )
        plain = [(n, v) for n, v in outputs.items() if not n.startswith("updated_")]
        others = [*caches.items(), *((n, v) for n, v in inputs.items() if n not in caches)]
        for index, (name, view) in enumerate(plain):
            for other, second in plain[index + 1 :] + others:
                assert not _overlap(view, second), f"{graph}: output {name} overlaps {other}"
        names = list(caches.items())
        for index, (name, view) in enumerate(names):
            for other, second in others[len(caches) :] + names[index + 1 :]:
                assert not _overlap(view, second), f"{graph}: {name} overlaps {other}"


class GrowingDevice(RecordingDevice):
    """Binds caches of any length up to the capacity; its kernels load 16 bytes at a time."""

    name = "growing-device"
    static_cache = False
    alignment = 16

    def program(self, calls: Sequence[Call], upload: View, download: View) -> Program:
        return Engine.program(self, calls, upload, download)  # it captures one call, not a sequence


class _Captured:
    """Run once call by call, as such runtimes want it, then captured with its transfers and replayed. What goes up and
    comes down lies in memory that the device reaches; who writes it between `launch` and `wait` is found out."""

    def __init__(self, device: RecordingDevice, calls: Sequence[Call], upload: View, download: View) -> None:
        device.stream.outside_a_capture("making a program")
        self._device, self._calls = device, list(calls)
        self._views = upload, download
        self.upload, self.download = (np.zeros(view.nbytes, np.uint8) for view in self._views)
        self._captured: Captured | None = None
        self._launched, self._sent = 0, b""

    def launch(self) -> None:
        stream = self._device.stream
        self._launched += 1
        self._sent = self.upload.tobytes()
        if self._launched == 1:
            self._enqueue()
            return
        if self._captured is None:
            with stream.capture() as self._captured:
                self._enqueue()
        self._captured.launch()
        stream.counts.bytes_up += self.upload.nbytes

    def wait(self) -> None:
        self._device.stream.synchronise()
        self._device.counts.bytes_down += self.download.nbytes

    def _enqueue(self) -> None:
        stream, memory = self._device.stream, self._device.memory
        up, down = self._views

        def bring() -> None:
            assert self.upload.tobytes() == self._sent, (
                "a program's upload was written before it was waited for"
            )
            memory.array(up)[...] = self.upload
            memory.state(up)[...] = WRITTEN

        def fetch() -> None:
            self.download[...] = memory.array(down)

        stream.enqueue(bring, self.upload.nbytes, pinned=True)
        for call in self._calls:
            call.run()
        stream.enqueue(fetch)


class _Copy:
    def __init__(self, device: RecordingDevice, target: View, source: View) -> None:
        self._device, self._target, self._source = device, target, source

    def run(self) -> None:
        memory = self._device.memory
        self._device.stream.enqueue(lambda: memory.copy(self._target, self._source))


class _Call:
    def __init__(
        self, device: RecordingDevice, graph: str, context: Context, inputs: dict[str, View],
        outputs: dict[str, View], width: int,
    ) -> None:  # fmt: skip
        self._device, self._graph, self._context = device, graph, context
        self._inputs, self._outputs, self._width = inputs, outputs, width
        self._addresses = {name: view.address for name, view in (inputs | outputs).items()}
        self._caches = _caches(inputs)
        private = device.memory.private
        known = {value.name for value in device.backend.interface(graph).outputs}
        self._compute = device.backend.bind(
            graph,
            {name: private(view) for name, view in inputs.items()},
            {name: private(view) for name, view in outputs.items() if name in known},
        )

    def run(self) -> None:
        device = self._device
        device.stream.hold(self._context, self)
        self._context.addresses = self._addresses
        device.stream.enqueue(self._execute)

    # --- when the queue gets here ---

    def _execute(self) -> None:
        device, graph = self._device, self._graph
        now = {name: view.address for name, view in (self._inputs | self._outputs).items()}
        assert now == self._addresses == self._context.addresses, f"{graph}: addresses moved since bind"
        self._check_defined()
        starts: tuple[int, ...] = ()
        if self._caches:
            starts = tuple(self._value("write_indices").tolist())
            self._check_starts(starts)
        if graph == "commit":
            self._check_sources()
        if "row_index" in self._inputs and "hidden" in self._inputs:  # else of tiles, in a vision graph
            self._check_range("row_index", prod(self._inputs["hidden"].shape[:2]))
        if "token_ids" in self._inputs:
            words = -1 if "embedding_scales" in self._inputs else 0  # a table of integers is [E, V]
            self._check_range("token_ids", self._inputs["embedding_table"].shape[words])
        for cache in self._caches.values():
            state = device.memory.state(cache)
            for sequence, start in enumerate(starts):
                state[sequence, :, start : start + self._width] = WRITTEN
        for name in MASKS.values():
            if name in self._inputs:
                self._check_visible(name)
        if CONV_SLOTS in self._inputs:
            self._check_conv_slots()
        device.runs.append(Recorded(graph, self._width, starts, self._addresses))
        self._compute.run()
        if device.interface(graph).role in ("head", *CHANGING):
            self._judge()
        for name, view in self._outputs.items():
            if not name.startswith("updated_"):
                device.memory.state(view)[...] = WRITTEN

    def _judge(self) -> None:
        logits = self._value("logits")
        best = logits.argmax(axis=-1)
        self._value("best")[...] = best
        self._value("finite")[...] = np.isfinite(np.take_along_axis(logits, best[:, None], axis=-1)[:, 0])

    def _value(self, name: str) -> np.ndarray:
        return self._device.memory.array(self._inputs.get(name) or self._outputs[name])

    def _check_defined(self) -> None:
        """Nothing is computed from memory that nobody wrote."""
        for name, view in self._inputs.items():
            if name not in self._caches:
                undefined = self._device.memory.state(view) < DEFINED
                assert not undefined.any(), (
                    f"{self._graph}: {name} {view.shape} was never written at {np.argwhere(undefined)[0, :-1].tolist()}"
                )

    def _check_starts(self, starts: tuple[int, ...]) -> None:
        rows = next(iter(self._caches.values())).shape[2]
        for sequence, start in enumerate(starts):
            assert start >= 0 and start + self._width <= rows, (
                f"{self._graph}: sequence {sequence} writes rows {start}..{start + self._width} of {rows}"
            )

    def _check_range(self, name: str, end: int) -> None:
        values = self._value(name)
        assert values.size == 0 or (values.min() >= 0 and values.max() < end), (
            f"{self._graph}: {name} {values.tolist()!r:.200} of {end}"
        )

    def _check_visible(self, name: str) -> None:
        mask = self._value(name)
        visible = mask if mask.dtype == bool else mask > MASKED
        seen = visible.any(axis=(1, 2))  # [batch, cache]
        for name, cache in self._caches.items():
            unwritten = seen & ~self._written(cache)
            assert not unwritten.any(), (
                f"{self._graph}: {name} shows never-written rows {np.argwhere(unwritten)[:4].tolist()}"
            )

    def _check_conv_slots(self) -> None:
        slots = self._value(CONV_SLOTS).reshape(len(self._value(CONV_SLOTS)), -1)
        for name, cache in self._caches.items():
            if name.startswith(CONV_CACHE):
                assert slots.min() >= -1 and slots.max() < cache.shape[2], (
                    f"{self._graph}: {CONV_SLOTS} {slots}"
                )
                read = np.take_along_axis(self._written(cache), np.maximum(slots, 0), axis=1) | (slots < 0)
                assert read.all(), f"{self._graph}: {name} reads never-written rows of {slots}"

    def _check_sources(self) -> None:
        source = self._value("source_rows")
        for name, cache in self._caches.items():
            rows = cache.shape[2]
            assert source.min() >= 0 and source.max() < rows, f"commit: source rows {source} of {rows}"
            written = np.take_along_axis(self._written(cache), source, axis=1)
            assert written.all(), f"commit: {name} copies never-written rows of {source}"

    def _written(self, cache: View) -> np.ndarray:
        """Which rows of a cache hold something, [batch, rows]."""
        return (self._device.memory.state(cache)[..., 0, 0] == WRITTEN).all(axis=1)


def _caches(inputs: Mapping[str, View]) -> dict[str, View]:
    return {name: view for name, view in inputs.items() if name.partition(".")[0].endswith("_cache")}


def _overlap(one: View, other: View) -> bool:
    return one.address < other.address + other.nbytes and other.address < one.address + one.nbytes
