"""A CUDA that is not there: memory of the host at real addresses, and a stream that does nothing before it is waited for.

It stands in for `runtime.engines.cuda.Cuda`, and refuses what CUDA refuses or leaves undefined: memory that was freed,
transfers from page-locked memory that changed on the way, allocations and waits while the stream captures.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from vlmexport.runtime.common.errors import DeviceError
from vlmexport.runtime.engines.cuda import DOWN, UP, WITHIN, Gpu, Versions

from .stream import Captured, Counts, Stream

ALIGNMENT = 256
POISON = 0xFF
"""In memory that nobody wrote, and in memory that was given back: NaN in every float format, −1 in every integer."""
STREAM = 7


class FakeCuda:
    """See the module. Violations raise AssertionError, those of queued work when the queue gets there."""

    def __init__(self, architecture: str = "sm87") -> None:
        self.queue = Stream()
        self.allocations = 0
        self._architecture = architecture
        self._blocks: dict[int, tuple[np.ndarray, str]] = {}
        self._starts: list[int] = []
        self._gone: list[np.ndarray] = []  # so that no later block takes the address
        self._captures: dict[int, Captured] = {}

    @property
    def counts(self) -> Counts:
        """Waits, enqueues, launches and bytes so far."""
        return self.queue.counts

    def gpu(self) -> Gpu:
        return Gpu("a GPU that is not there", self._architecture)

    def versions(self) -> Versions:
        return Versions("13.0", "12.6")

    # --- memory ---

    def allocate(self, name: str, nbytes: int) -> int:
        self.allocations += 1
        return self._allocate(nbytes, "device")

    def free(self, address: int) -> None:
        self._free(address, "device")

    def allocate_host(self, name: str, nbytes: int) -> int:
        return self._allocate(nbytes, "host")

    def free_host(self, address: int) -> None:
        self._free(address, "host")

    def bytes_at(self, address: int, nbytes: int, where: str = "device") -> np.ndarray:
        """uint8 [nbytes] of one block that is still there."""
        at = bisect_right(self._starts, address) - 1
        start = self._starts[at] if at >= 0 else 0
        block, kind = self._blocks.get(start, (np.empty(0, np.uint8), where))
        assert kind == where and address - start + nbytes <= len(block), (
            f"{nbytes} bytes at {address:#x} are not memory of the {where}, or not any more"
        )
        return block[address - start : address - start + nbytes]

    def pinned(self, address: int) -> bool:
        """Whether an address is in page-locked memory."""
        at = bisect_right(self._starts, address) - 1
        block, kind = self._blocks[self._starts[at]] if at >= 0 else (np.empty(0), "")
        return kind == "host" and address < self._starts[at] + len(block)

    # --- work of the stream ---

    def create_stream(self) -> int:
        return STREAM

    def destroy_stream(self, stream: int) -> None:
        self._own(stream)
        assert not self.queue.queue, "a stream was destroyed before it was waited for"

    def synchronise(self, stream: int) -> None:
        self._own(stream)
        self.queue.synchronise()

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._own(stream)
        self.bytes_at(address, nbytes)
        self.queue.enqueue(lambda: self.bytes_at(address, nbytes).fill(value))

    def copy(self, target: int, source: int, nbytes: int, direction: int, stream: int) -> None:
        self._own(stream)
        ends = {UP: ("device", "host"), DOWN: ("host", "device"), WITHIN: ("device", "device")}[direction]
        self.queue.enqueue(_Transfer(self, target, source, nbytes, ends), pinned=True)

    # --- captured work ---

    def begin_capture(self, stream: int) -> None:
        self._own(stream)
        self._capture = self.queue.capture()
        self._captured = self._capture.__enter__()

    def end_capture(self, stream: int) -> int:
        self._own(stream)
        if self.queue._capturing is None:
            raise DeviceError("CUDA: cudaStreamEndCapture failed: the stream is not capturing")
        self._capture.__exit__(None, None, None)
        number = len(self._captures) + 1
        self._captures[number] = self._captured
        return number

    def launch(self, captured: int, stream: int) -> None:
        self._own(stream)
        self.queue.outside_a_capture("launching")
        self.counts.launches += 1
        for work in self._captures[captured].work:
            self.queue.queue.append(work.again() if isinstance(work, _Transfer) else work)

    def free_captured(self, captured: int) -> None:
        self.queue.outside_a_capture("forgetting what was captured")
        self._captures[captured] = Captured(self.queue)

    # --- kernels ---

    def load_kernels(self, code: bytes, *names: str) -> dict[str, int]:
        self.queue.outside_a_capture("loading kernels")
        for name in names:
            assert f".entry {name}(".encode() in code, f"there is no kernel {name}"
        self._kernels = {100 + number: name for number, name in enumerate(names)}
        return {name: number for number, name in self._kernels.items()}

    def run_kernel(
        self, function: int, blocks: tuple[int, int], threads: int, arguments: Sequence[Any], stream: int
    ) -> None:
        self._own(stream)
        values = [each.value for each in arguments]
        name = self._kernels[function]
        assert blocks[0] * threads >= values[-1] > (blocks[0] - 1) * threads, "other blocks than elements"
        self.queue.enqueue(lambda: getattr(self, f"_{name}")(blocks[1], *values))

    def _split_mask(
        self, _tensors: int, mask: int, before: int, own: int, starts: int, heads: int, width: int, cache: int,
        item: int, hidden: int, count: int,
    ) -> None:  # fmt: skip
        """What the kernel does, in its own terms."""
        rows = count // cache
        given = self.bytes_at(mask, count * item).reshape(rows, cache, item)
        out = self.bytes_at(before, count * item).reshape(rows, cache, item)
        new = self.bytes_at(own, rows * width * item).reshape(rows, width, item)
        first = self.bytes_at(starts, 8 * (rows // width // heads)).view(np.int64)
        out[...] = given
        for row in range(rows):
            start = first[row // width // heads]
            out[row, start:] = np.frombuffer(hidden.to_bytes(4, "little"), np.uint8)[:item]
            new[row] = given[row, start : start + width]

    def _append_rows(
        self,
        tensors: int,
        table: int,
        starts: int,
        heads: int,
        width: int,
        capacity: int,
        words: int,
        count: int,
    ) -> None:
        """What the kernel does, in its own terms."""
        batch = count // words // width // heads
        first = self.bytes_at(starts, 8 * batch).view(np.int64)
        for source, target in self.bytes_at(table, 16 * tensors).view(np.int64).reshape(tensors, 2):
            rows = self.bytes_at(source, 4 * count).reshape(batch, heads, width, 4 * words)
            cache = self.bytes_at(target, 4 * batch * heads * capacity * words)
            cache = cache.reshape(batch, heads, capacity, 4 * words)
            for sequence, start in enumerate(first):
                assert 0 <= start <= capacity - width, f"rows from {start} on leave a cache of {capacity}"
                cache[sequence, :, start : start + width] = rows[sequence]

    # --- private ---

    def _own(self, stream: int) -> None:
        assert stream == STREAM, f"{stream} is no stream of this device"

    def _allocate(self, nbytes: int, where: str) -> int:
        self.queue.outside_a_capture("allocating")
        raw = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        block = raw[start : start + nbytes]
        address = raw.ctypes.data + start
        self._blocks[address] = (block, where)
        insort(self._starts, address)
        return address

    def _free(self, address: int, where: str) -> None:
        self.queue.outside_a_capture("freeing")
        block, kind = self._blocks.pop(address)
        assert kind == where, f"memory of the {kind} was given back as memory of the {where}"
        self._starts.remove(address)
        block[...] = POISON
        self._gone.append(block)


class _Transfer:
    """A copy, from the moment at which it is put into the queue."""

    def __init__(self, cuda: FakeCuda, target: int, source: int, nbytes: int, ends: tuple[str, str]) -> None:
        self._cuda, self._target, self._source, self._nbytes, self._ends = cuda, target, source, nbytes, ends
        given = cuda.bytes_at(source, nbytes, ends[1])
        cuda.bytes_at(target, nbytes, ends[0])
        self._sent = given.tobytes() if ends[1] == "host" else None
        if self._sent is not None:
            cuda.counts.bytes_up += nbytes

    def again(self) -> _Transfer:
        """The same copy, launched now."""
        return _Transfer(self._cuda, self._target, self._source, self._nbytes, self._ends)

    def __call__(self) -> None:
        cuda = self._cuda
        source = cuda.bytes_at(self._source, self._nbytes, self._ends[1])
        assert self._sent is None or source.tobytes() == self._sent, (
            "page-locked memory was written again before its transfer"
        )
        cuda.bytes_at(self._target, self._nbytes, self._ends[0])[...] = source
        if self._ends[0] == "host":
            cuda.counts.bytes_down += self._nbytes
