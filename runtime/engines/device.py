"""What engines on a CUDA device share: memory with fixed addresses, transfers, and programs that are captured.

Everything goes through one stream in the order of the calls. What the host writes is laid into page-locked memory first,
which is free again when the stream was waited for.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..common.errors import DeviceError
from .base import DTYPES, Buffer, Call, Engine, Program, View
from .cuda import DOWN, UP, WITHIN, Cuda

if TYPE_CHECKING:
    from ..bundle.manifest import GraphInfo

ALIGNMENT = 256
"""Of addresses that a GPU engine binds."""

STAGED = 8 << 20
"""Bytes that may be on their way at a time; more of them wait."""


class DeviceEngine(Engine):
    """See the module. Subclasses execute graphs, on `stream`."""

    alignment = ALIGNMENT
    captures: ClassVar[bool] = True
    """Whether calls can be captured with others into one sequence."""

    def __init__(self, graphs: Mapping[str, GraphInfo], cuda: Cuda):
        super().__init__(graphs)
        self.cuda, self.gpu = cuda, cuda.gpu()
        self.machine = self.gpu.name
        self.stream = cuda.create_stream()
        self.settled = 0
        """Changes when calls that were bound before are given other memory: they are run once more before a capture."""
        self.capturing = False
        """Whether what is run now is collected instead of done."""
        self._resources = Resources()
        self._staging: np.ndarray | None = None
        self._staged = 0
        self._passing: dict[str, Buffer] = {}

    # --- memory ---

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        address = self.cuda.allocate(name, nbytes)
        buffer = Buffer(name, nbytes, address)
        self._resources.hold(buffer, self.cuda.free, address)
        if zeroed:
            self.cuda.fill(address, 0, nbytes, self.stream)
        return buffer

    def write(self, view: View, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array)
        if data.shape != view.shape or data.dtype != DTYPES[view.dtype]:
            raise ValueError(
                f"{view.buffer.name}: wrote {data.dtype} {data.shape} into {view.dtype} {view.shape}"
            )
        given = data.reshape(-1).view(np.uint8)
        for start in range(0, len(given), STAGED):
            part = given[start : start + STAGED]
            place = self._place(len(part))
            place[:] = part
            self.cuda.copy(view.address + start, place.ctypes.data, len(part), UP, self.stream)

    def read(self, view: View) -> np.ndarray:
        data = np.empty(view.nbytes, np.uint8)
        for start in range(0, view.nbytes, STAGED):
            part = data[start : start + STAGED]
            place = self._place(len(part))
            self.cuda.copy(place.ctypes.data, view.address + start, len(part), DOWN, self.stream)
            self.synchronise()
            part[:] = place
        return data.view(DTYPES[view.dtype]).reshape(view.shape)

    def synchronise(self) -> None:
        """Wait for everything that was queued; memory that nobody holds any more is given back."""
        self.cuda.synchronise(self.stream)
        self._staged = 0
        self._resources.release()

    def pinned(self, name: str, nbytes: int) -> np.ndarray:
        """Page-locked memory of the host, uint8 [nbytes], for as long as somebody holds it."""
        address = self.cuda.allocate_host(name, nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self._resources.hold(memory, self.cuda.free_host, address, outlives=True)
        array = np.ctypeslib.as_array(memory)
        array[:] = 0
        return array

    def passing(self, name: str, shape: tuple[int, ...], dtype: str) -> View:
        """Memory that holds something from one step of a call to the next: the calls of a stream share it."""
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        buffer = self._passing.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._passing[name] = self.allocate(name, nbytes)
        return buffer.view(shape, dtype)

    def _place(self, nbytes: int) -> np.ndarray:
        """Page-locked memory for a transfer, uint8 [nbytes], that nothing else uses before the stream was waited for."""
        if self._staging is None:
            self._staging = self.pinned("staging", STAGED)
        if self._staged + nbytes > STAGED:
            self.synchronise()
        start, self._staged = self._staged, self._staged + nbytes
        return self._staging[start : self._staged]

    def _copy(self, target: View, source: View) -> Call:
        return _Copy(self, target, source)

    # --- programs ---

    def program(self, calls: Sequence[Call], upload: View, download: View) -> Program:
        return _Captured(self, calls, upload, download)

    def repeated(self, calls: Sequence[Call]) -> Sequence[Call]:
        return [_Replayed(self, calls)]

    def held(self, program: object, captured: int) -> None:
        """What was captured of a program is freed when that is gone."""
        self._resources.hold(program, self.cuda.free_captured, captured)

    def drop(self) -> None:
        """Let go, while the stream is still there, of what works in it: calls, and what they are calls of."""

    def close(self) -> None:
        if self.stream == 0:
            return
        with suppress(DeviceError):  # what was queued has failed: it is over all the same
            self.cuda.synchronise(self.stream)
        self.drop()
        self._staging = None
        self._resources.close()
        self.cuda.destroy_stream(self.stream)
        self.stream = 0


class Steps:
    """Calls that are one call."""

    def __init__(self, steps: Sequence[Call]):
        self.steps = steps

    @property
    def capturable(self) -> bool:
        """Whether all of them can be captured."""
        return all(getattr(step, "capturable", True) for step in self.steps)

    def run(self) -> None:
        for step in self.steps:
            step.run()


class Resources:
    """What has to be given back to CUDA. It is given back when the stream was waited for: until then what is queued may use
    it, and nothing may be freed while a stream captures."""

    def __init__(self) -> None:
        self._held: dict[tuple[Callable[[int], None], int], tuple[bool, weakref.finalize]] = {}
        self._spent: list[tuple[Callable[[int], None], int]] = []
        self._closed = False

    def hold(self, holder: object, free: Callable[[int], None], value: int, outlives: bool = False) -> None:
        """`value` is to be freed after `holder` is gone; with `outlives` not before, even when all is closed."""
        finalizer = weakref.finalize(holder, self._spend, free, value)
        finalizer.atexit = False
        self._held[free, value] = outlives, finalizer

    def release(self) -> None:
        """Give back what nobody holds any more."""
        while self._spent:
            self._free(*self._spent.pop())

    def close(self) -> None:
        """Give back everything, but for what its holders can still read."""
        self.release()
        for (free, value), (outlives, finalizer) in list(self._held.items()):
            if not outlives:
                finalizer.detach()  # which would keep what `free` belongs to
                self._free(free, value)
        self._closed = True

    def _spend(self, free: Callable[[int], None], value: int) -> None:
        if self._closed:
            self._free(free, value)
        else:
            self._spent.append((free, value))

    def _free(self, free: Callable[[int], None], value: int) -> None:
        if self._held.pop((free, value), None) is not None:
            free(value)


class _Copy:
    __slots__ = ("_arguments", "_copy", "_keep")

    def __init__(self, engine: DeviceEngine, target: View, source: View):
        self._copy, self._keep = engine.cuda.copy, (target, source)
        self._arguments = target.address, source.address, source.nbytes, WITHIN, engine.stream

    def run(self) -> None:
        self._copy(*self._arguments)


class _Replayed:
    """Calls that are put into the stream one by one the first time, then captured and replayed."""

    def __init__(self, engine: DeviceEngine, calls: Sequence[Call]):
        self._engine = engine
        self._calls = [
            step for call in calls for step in (call.steps if isinstance(call, Steps) else (call,))
        ]
        self._captured = 0
        self._ran: int | None = None
        """`settled` of the engine when the calls were last run one by one."""

    def run(self) -> None:
        engine = self._engine
        if not self._captured and self._ran == engine.settled and self._can_be_captured():
            self._capture()
        if self._captured:
            engine.cuda.launch(self._captured, engine.stream)
        else:
            self._ran = engine.settled
            self._enqueue()

    def _can_be_captured(self) -> bool:
        return self._engine.captures and all(getattr(call, "capturable", True) for call in self._calls)

    def _capture(self) -> None:
        cuda, stream = self._engine.cuda, self._engine.stream
        cuda.begin_capture(stream)
        self._engine.capturing = True
        try:
            self._enqueue()
        except BaseException:
            with suppress(DeviceError):  # the capture is broken already
                cuda.free_captured(cuda.end_capture(stream))
            raise
        finally:
            self._engine.capturing = False
        self._captured = cuda.end_capture(stream)
        self._engine.held(self, self._captured)

    def _enqueue(self) -> None:
        for call in self._calls:
            call.run()


class _Captured(_Replayed):
    """Calls between two transfers."""

    def __init__(self, engine: DeviceEngine, calls: Sequence[Call], upload: View, download: View):
        super().__init__(engine, calls)
        self._views = upload, download
        self.upload = engine.pinned("upload", upload.nbytes)
        self.download = engine.pinned("download", download.nbytes)

    def launch(self) -> None:
        self.run()

    def wait(self) -> None:
        self._engine.synchronise()

    def _enqueue(self) -> None:
        cuda, stream = self._engine.cuda, self._engine.stream
        up, down = self._views
        cuda.copy(up.address, self.upload.ctypes.data, up.nbytes, UP, stream)
        super()._enqueue()
        cuda.copy(self.download.ctypes.data, down.address, down.nbytes, DOWN, stream)
