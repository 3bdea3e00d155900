"""What an engine is: it executes named graphs on buffers that it allocated.

Everything above (arena, masks, decoder, cycle) is the same code for every engine, so an engine knows nothing
about tokens, lengths or drafts. All shapes and addresses are fixed when a call is bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..common.errors import BundleError
from ..hardware.machine import processor

if TYPE_CHECKING:
    from ..bundle.manifest import GraphInfo

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),  # storage only: numpy has no bfloat16
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""numpy storage type of every dtype name of a manifest."""


Reading = Callable[..., AbstractContextManager[None]]
"""`reading(*names)`: files of the bundle are read by their path inside the block (`Bundle.reading`)."""


def unwatched(*names: str) -> AbstractContextManager[None]:
    """`Reading` of a folder that nobody replaces."""
    return nullcontext()


@dataclass(frozen=True, eq=False)
class Buffer:
    """Bytes with a fixed address for the life of the engine; `data` is what the engine needs to reach them.

    A buffer has no dtype of its own: its views have.
    """

    name: str
    nbytes: int
    address: int
    data: Any = None

    def view(self, shape: tuple[int, ...], dtype: str, offset: int = 0) -> View:
        """A contiguous part as `shape` of `dtype`, `offset` elements of that dtype after the buffer's start.

        Raises `ValueError` when it leaves the buffer.
        """
        view = View(self, shape, dtype, offset)
        start = offset * DTYPES[dtype].itemsize
        if offset < 0 or start + view.nbytes > self.nbytes:
            raise ValueError(
                f"view {shape} of {dtype} at element {offset} leaves buffer {self.name!r} of {self.nbytes} bytes"
            )
        return view


@dataclass(frozen=True, eq=False)
class View:
    """A contiguous part of a buffer with a shape and a dtype; `offset` counts elements. Made by `Buffer.view`."""

    buffer: Buffer
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset * DTYPES[self.dtype].itemsize

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPES[self.dtype].itemsize


class Call(Protocol):
    """Work with fixed shapes and addresses: a graph bound to buffers, or a copy."""

    def run(self) -> None:
        """Do it, or, on an engine with a queue, put it into the queue; `Engine.read` waits for what it needs."""
        ...


class Program(Protocol):
    """Calls that are done as one, from one transfer to the engine to one transfer back."""

    upload: np.ndarray
    """uint8: what the next `launch` brings to the engine; not to be touched from there until `wait` has returned."""
    download: np.ndarray
    """uint8: what the last `wait` brought back."""

    def launch(self) -> None:
        """Do it, or put all of it into the engine's queue."""
        ...

    def wait(self) -> None:
        """Return when it is done. On an engine with a queue this waits, once, like `Engine.read`."""
        ...


class Engine(ABC):
    """Executes graphs. The public methods check what they are given; subclasses override the abstract ones.

    `graphs` is the manifest's: the interfaces of the files on disk.
    """

    name: ClassVar[str]
    static_cache: ClassVar[bool] = False
    """True: the `cache` dimension is frozen to the capacity; False: any length may be bound."""
    host_memory: ClassVar[bool] = False
    """True: `read` returns the memory itself, so the runtime writes masks, tokens and hidden states straight into
    buffers."""
    alignment: ClassVar[int] = 1
    """Every bound address is a multiple of this many bytes."""
    version: str = ""
    """Of the library whose kernels compute."""

    def __init__(self, graphs: Mapping[str, GraphInfo]):
        self.graphs = graphs
        self.threads: int | None = None
        """Host threads that execute graphs; None where the host does not."""
        self.machine = processor()
        """Name of what computes: pass times are stored, and found, under it."""
        self.note: str | None = None
        """What a user should know of how this engine computes the bundle; None where it does as the manifest says."""
        self.busy = 0.0
        """Seconds that calls have taken so far, on an engine whose calls return when they are done; others leave it at 0."""

    def interface(self, graph: str) -> GraphInfo:
        """Inputs and outputs as this engine binds them (it may widen dtypes). `BundleError` for an unknown graph."""
        info = self.graphs.get(graph)
        if info is None:
            raise BundleError(
                f"the bundle has no graph {graph!r:.80}; it has {', '.join(sorted(self.graphs))}"
            )
        return info

    def dtype(self, graph: str, value: str) -> str:
        """dtype of an input or output as this engine binds it. `BundleError` for a name that the graph has not."""
        info = self.interface(graph)
        for entry in (*info.inputs, *info.outputs):
            if entry.name == value:
                return entry.dtype
        raise BundleError(f"graph {graph} has no input or output {value!r:.80}; build the bundle again")

    def load(self, *graphs: str) -> None:  # noqa: B027 - a default: nothing to load
        """Load graphs now instead of at their first use. Raises `BundleError` for what cannot be loaded."""

    def close(self) -> None:  # noqa: B027 - a default: nothing to free
        """Free what was loaded and allocated; the engine is not used afterwards. Closing twice does nothing."""

    @abstractmethod
    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        """A buffer with a fixed address, a multiple of `alignment` and of every dtype's size. Raises `CapacityError`
        without memory.

        `zeroed`: filled with zeros; otherwise it may hold anything, NaN included, until it is written. Key/value
        caches need it: a masked slot is multiplied by zero, and 0 × NaN would be NaN.
        """

    def constant(self, name: str, array: np.ndarray) -> View:
        """A read-only input, for instance the memory-mapped embedding table; not copied where it can be helped."""
        view = self.allocate(name, array.nbytes).view(array.shape, dtype_name(array))
        self.write(view, array)
        return view

    def bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        """Fix shapes and addresses. Outputs that nobody needs may be left out, but for `updated_*`, which must have
        the address of its input. Raises `ValueError` for unknown or missing names, for an `updated_*` elsewhere and
        for addresses off the alignment."""
        info = self.interface(graph)
        wanted, offered = {value.name for value in info.inputs}, {value.name for value in info.outputs}
        if wanted != inputs.keys() or not outputs.keys() <= offered:
            odd = sorted((wanted ^ inputs.keys()) | (outputs.keys() - offered))
            raise ValueError(f"graph {graph}: inputs or outputs do not fit its interface: {', '.join(odd)}")
        for name in offered:
            if name.startswith("updated_"):
                target, source = outputs.get(name), inputs[name.removeprefix("updated_")]
                if target is None or target.address != source.address:
                    raise ValueError(f"graph {graph}: {name} must be bound at the address of its input")
        if self.alignment > 1:
            for name, view in (*inputs.items(), *outputs.items()):
                if view.address % self.alignment:
                    raise ValueError(
                        f"graph {graph}: {name} at {view.address:#x} is not {self.alignment}-aligned"
                    )
        return self._bind(graph, inputs, outputs)

    @abstractmethod
    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call: ...

    def copy(self, target: View, source: View) -> Call:
        """A call that copies the bytes of `source` to `target` where the buffers are; they must not overlap, and need
        no alignment. Raises `ValueError` for other sizes."""
        if target.nbytes != source.nbytes:
            raise ValueError(f"copy of {source.nbytes} bytes into {target.nbytes}")
        return self._copy(target, source)

    def _copy(self, target: View, source: View) -> Call:
        return _HostCopy(self, target, source)

    def program(self, calls: Sequence[Call], upload: View, download: View) -> Program:
        """`calls` of this engine, in their order, between a transfer to `upload` and one from `download` (uint8 [n]
        both). An engine that can capture work replays it."""
        return _Program(self, calls, upload, download)

    def repeated(self, calls: Sequence[Call]) -> Sequence[Call]:
        """`calls` of this engine as a program runs them again and again, without its transfers: an engine that captures work
        replays it from the second or third time on."""
        return calls

    @abstractmethod
    def write(self, view: View, array: np.ndarray) -> None:
        """Host to engine, after everything that was run before; `array` has the view's shape and dtype.

        An engine with a queue may take the bytes when the queue gets there: `array` must not change before the next
        `read` has returned.
        """

    @abstractmethod
    def read(self, view: View) -> np.ndarray:
        """Engine to host, after everything that was run before; with `host_memory` the memory itself, otherwise an
        array that later calls leave alone. On an engine with a queue this waits: it is the only call that does."""


class _Program:
    """Calls that are put into the queue one by one, for engines that capture nothing."""

    def __init__(self, engine: Engine, calls: Sequence[Call], upload: View, download: View):
        self._engine, self._calls, self._views = engine, list(calls), (upload, download)
        self.upload = np.zeros(upload.nbytes, np.uint8)
        self.download = np.zeros(download.nbytes, np.uint8)

    def launch(self) -> None:
        self._engine.write(self._views[0], self.upload)
        for call in self._calls:
            call.run()

    def wait(self) -> None:
        self.download[:] = self._engine.read(self._views[1])


class _HostCopy:
    """A copy through the host, for engines without a better way."""

    __slots__ = ("_engine", "_source", "_target")

    def __init__(self, engine: Engine, target: View, source: View):
        self._engine, self._target, self._source = engine, _as_bytes(target), _as_bytes(source)

    def run(self) -> None:
        self._engine.write(self._target, self._engine.read(self._source))


def _as_bytes(view: View) -> View:
    return view.buffer.view((view.nbytes,), "uint8", view.address - view.buffer.address)


def dtype_name(array: np.ndarray) -> str:
    """The manifest's name for an array's dtype (uint16 holds bfloat16 bits). Raises `ValueError` for others."""
    for name, dtype in DTYPES.items():
        if dtype == array.dtype:
            return name
    raise ValueError(f"engines hold no {array.dtype}; they hold {', '.join(DTYPES)}")
