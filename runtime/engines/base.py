"""What an engine is: it executes named graphs on buffers that it allocated.

Everything above (arena, masks, decoder, cycle) is the same code for every engine, so an engine knows nothing
about tokens, lengths or drafts. All shapes and addresses are fixed when a call is bound.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ..errors import BundleError

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


class Engine(ABC):
    """Executes graphs. The public methods check what they are given; subclasses override the abstract ones.

    `graphs` is the manifest's: the interfaces of the files on disk.
    """

    name: ClassVar[str]
    static_cache: ClassVar[bool] = False
    """True: the `cache` dimension is frozen to the capacity; False: any length may be bound."""
    host_memory: ClassVar[bool] = False
    """True: `read` returns the memory itself, so the runtime writes masks, tokens and rows straight into buffers."""
    alignment: ClassVar[int] = 1
    """Every bound address is a multiple of this many bytes."""

    def __init__(self, graphs: Mapping[str, GraphInfo]):
        self.graphs = graphs
        self.threads: int | None = None
        """Host threads that execute graphs; None where the host does not."""

    def interface(self, graph: str) -> GraphInfo:
        """Inputs and outputs as this engine binds them (it may widen dtypes). `BundleError` for an unknown graph."""
        found = self.graphs.get(graph)
        if found is None:
            raise BundleError(
                f"the bundle has no graph {graph!r:.80}; it has {', '.join(sorted(self.graphs))}"
            )
        return found

    def dtype(self, graph: str, value: str) -> str:
        """dtype of an input or output as this engine binds it."""
        info = self.interface(graph)
        return next(entry.dtype for entry in (*info.inputs, *info.outputs) if entry.name == value)

    def load(self, *graphs: str) -> None:  # noqa: B027 - a default: nothing to load
        """Load graphs now instead of at their first use. Raises `BundleError` for what cannot be loaded."""

    def close(self) -> None:  # noqa: B027 - a default: nothing to free
        """Free what was loaded and allocated; the engine is not used afterwards. Closing twice does nothing."""

    @abstractmethod
    def allocate(self, name: str, nbytes: int) -> Buffer:
        """A zeroed buffer with a fixed address, aligned for every dtype. Raises `CapacityError` without memory."""

    def constant(self, name: str, array: np.ndarray) -> View:
        """A read-only input, for instance the memory-mapped embedding table; not copied where it can be helped."""
        view = self.allocate(name, array.nbytes).view(array.shape, dtype_name(array))
        self.write(view, array)
        return view

    def bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Call:
        """Fix shapes and addresses. An output may share its address with an input; outputs that nobody needs may
        be left out. Raises `ValueError` for unknown or missing names and for addresses off the alignment."""
        info = self.interface(graph)
        wanted, offered = {value.name for value in info.inputs}, {value.name for value in info.outputs}
        if wanted != inputs.keys() or not outputs.keys() <= offered:
            odd = sorted((wanted ^ inputs.keys()) | (outputs.keys() - offered))
            raise ValueError(f"graph {graph}: inputs or outputs do not fit its interface: {', '.join(odd)}")
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
        """A call that copies `source` to `target`, of the same bytes, where the buffers are."""
        if target.nbytes != source.nbytes:
            raise ValueError(f"copy of {source.nbytes} bytes into {target.nbytes}")
        return _HostCopy(self, target, source)

    @abstractmethod
    def write(self, view: View, array: np.ndarray) -> None:
        """Host to engine, after everything that was run before; `array` has the view's shape and dtype."""

    @abstractmethod
    def read(self, view: View) -> np.ndarray:
        """Engine to host, after everything that was run before; with `host_memory` the memory itself."""


class _HostCopy:
    """A copy through the host, for engines without a better way."""

    __slots__ = ("_engine", "_source", "_target")

    def __init__(self, engine: Engine, target: View, source: View):
        self._engine, self._target, self._source = engine, target, source

    def run(self) -> None:
        array = self._engine.read(self._source)
        self._engine.write(self._target, array.reshape(self._target.shape))


def dtype_name(array: np.ndarray) -> str:
    """The manifest's name for an array's dtype (uint16 holds bfloat16 bits)."""
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
