"""How much memory a build takes, how much there is, and which of its steps fits.

Estimates are of resident memory in bytes; `benchmarks/build_memory.py` compares them with real builds.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROCESS_BYTES = 490 << 20
"""A build before any weight: Python, PyTorch, transformers, ONNX, traced graphs (measured on Linux)."""

LEFTOVER_BYTES = 90 << 20
"""What the reference adds to the process beside what is counted: the skeletons of its models, heap that is not given back
(measured)."""

WHOLE_SHARE = 0.9
"""Share of the available memory that comparing whole may take; the rest is for what nobody estimates."""

LARGE_MATRIX_BYTES = 1 << 30
"""A matrix of this many bytes in float64 is not held in float64 (`parity/large_matrices.py`)."""

SLICE_BYTES = 64 << 20
"""What of a large matrix is in float64 at a time."""

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt
_LARGE = 1 << 20


@dataclass(frozen=True)
class GraphMemory:
    """Bytes in float32 of the weights that a graph refers to: all of them, the largest, and what the group of nodes
    (a layer) takes that takes most.

    ONNX Runtime maps a weight, packs it into memory of its own and lets the mapped pages go, one weight after another:
    a session's peak is its weights and the largest of them once more.
    """

    weights: int
    largest: int
    piece: int


def graph_memory(nodes: Iterable[tuple[str, Sequence[str]]], weights: Mapping[str, int]) -> GraphMemory:
    """From a graph's nodes (name, names of what they read) and the bytes of its weights by name."""
    groups: list[set[str]] = []
    last = None
    for name, reads in nodes:
        prefix = node_prefix(name)
        if not groups or prefix != last:
            groups.append(set())
            last = prefix
        groups[-1].update(n for n in reads if n in weights)
    pieces = [[weights[n] for n in group] for group in groups if group]
    every = [weights[n] for n in set().union(*groups)] if groups else []
    return GraphMemory(sum(every), max(every, default=0), max((sum(p) + max(p) for p in pieces), default=0))


def node_prefix(name: str) -> str:
    """`layer.3` of `layer.3/MatMul_7`: nodes of one prefix in a row are a piece of their graph."""
    return name.partition("/")[0] if "/" in name else ""


@dataclass(frozen=True)
class CheckpointMemory:
    """Bytes of a checkpoint's floating-point tensors: as stored, all in float32, the largest as stored, and the most that
    one takes as stored and widened together (`widened_bytes`)."""

    stored: int
    float32: int
    largest: int
    widened: int


def is_large(shape: Sequence[int]) -> bool:
    """Whether a tensor is a matrix that parity does not hold in float64."""
    return len(shape) == 2 and 8 * math.prod(shape) >= LARGE_MATRIX_BYTES


def widened_bytes(shape: Sequence[int], stored: int) -> int:
    """Bytes of a tensor of `stored` bytes beside its copy in float64; of a large matrix beside that in float32."""
    return stored + (4 if is_large(shape) else 8) * math.prod(shape)


@dataclass(frozen=True)
class RecordedMemory:
    """Bytes of what parity keeps of the reference: beside a module of it in float64, where its last pass has just ended,
    and beside graphs."""

    module: int
    passed: int
    graphs: int

    @classmethod
    def of(cls, inputs: Sequence[int]) -> RecordedMemory:
        """From the bytes in float32 of each of the inputs, in their order. Each runs in float32, is recorded, runs in
        float64 (twice the bytes) and leaves its errors; all of them and their errors stay for the graphs."""
        before = [2 * sum(inputs[:number]) for number in range(len(inputs))]
        pairs = list(zip(before, inputs, strict=True))
        return cls(
            max(kept + 3 * own for kept, own in pairs),
            max(kept + 4 * own for kept, own in pairs),
            2 * sum(inputs),
        )

    def other_bytes(self, module: int, graphs: int) -> int:
        """The peak of all three, with the largest `module` and what running the `graphs` takes."""
        return LEFTOVER_BYTES + max(self.module + module, self.passed, self.graphs + graphs)


def whole_parity_bytes(
    graphs: Iterable[GraphMemory], model: CheckpointMemory, recorded: RecordedMemory
) -> int:
    """Comparing whole: the reference model, beside the shards it is read from (transformers maps them all at once), then
    with what was `recorded` of it beside one module of it in float64 or sessions for all graphs."""
    graphs = list(graphs)
    sessions = sum(g.weights for g in graphs) + max((g.largest for g in graphs), default=0)
    return model.float32 + max(model.stored, recorded.other_bytes(model.widened, sessions))


def streamed_parity_bytes(
    graphs: Iterable[GraphMemory], model: CheckpointMemory, recorded: RecordedMemory
) -> int:
    """Comparing layer by layer: what was `recorded` beside one module of the reference in float64, or beside one piece
    of a graph."""
    return recorded.other_bytes(model.widened, max((g.piece for g in graphs), default=0))


def fits_whole(needed: int, limit: int | None, weights: int) -> bool:
    """Whether parity runs whole. `limit` (bytes) is the user's bound on the weights; without it `needed` must fit the
    available memory, and where nobody says how much that is, whole is right for weights of at most 4 GiB."""
    if limit is not None:
        return weights <= limit
    available = available_memory()
    return weights <= 4 << 30 if available is None else needed <= WHOLE_SHARE * available


def available_memory() -> int | None:
    """Bytes that this process can still take: of the machine, and of its control groups. None where neither is told."""
    limits = [_machine_memory(), *_group_memory()]
    known = [value for value in limits if value is not None]
    return min(known) if known else None


def _machine_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # without /proc: what there is, less what no one says is taken
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return None


def _group_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[int]:
    """What the memory controllers above this process leave, version 2 and 1; page cache counts as free."""
    left = []
    for folder, limit, used in _group_folders(root, membership):
        try:
            bound = int((folder / limit).read_text())  # "max" is no number: no bound
            taken = int((folder / used).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        left.append(max(0, bound - max(0, taken - cache)))
    return left


def _group_folders(root: Path, membership: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        number, controllers, name = line.split(":", 2)
        relative = name.lstrip("/")
        if number == "0":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        place = base / relative
        for folder in (place, *place.parents):
            if folder.is_relative_to(base):
                folders.append((folder, *names))
    return folders


def return_large_buffers() -> None:
    """Lets glibc give buffers of a megabyte and more back to the system when they are freed.

    It otherwise raises that bound to the largest buffer it has seen freed (up to 32 MiB) and keeps later ones of a
    model in its heap, between small objects: 600 MB after a streamed pass over 0.6 B parameters.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_MMAP_THRESHOLD, _LARGE)


def use_large_pages() -> None:
    """Asks PyTorch to take large tensors in pages of 2 MB, where the kernel leaves that to programs (`madvise`).

    A build touches every parameter several times, each time in new memory, and for pages of 4 KB the kernel takes longer
    than the numbers do (`benchmarks/large_pages.py`). PyTorch reads the variable once, when it first allocates: call this
    before it is imported.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
