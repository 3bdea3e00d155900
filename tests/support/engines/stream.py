"""The queue of a device that is not there: nothing is done before it is synchronised, and captured work is replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

Work = Callable[[], None]


@dataclass
class Counts:
    """What a device was asked for. `enqueues` counts calls and copies put into the queue one by one, a launch of a
    captured sequence counts once."""

    synchronisations: int = 0
    enqueues: int = 0
    launches: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Counts)))

    def copy(self) -> Counts:
        """As it is now."""
        return self - Counts()


class Context:
    """An execution context: holds addresses for one shape of one graph, as a runtime such as TensorRT does."""

    def __init__(self, graph: str) -> None:
        self.graph = graph
        self.addresses: dict[str, int] = {}


class Captured:
    """Work that was captured: `launch` puts all of it into the queue at once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.work: list[Work] = []

    def launch(self) -> None:
        """Do the same again, after everything that was enqueued before."""
        self._stream.outside_a_capture("launch a captured sequence")
        self._stream.counts.launches += 1
        self._stream.queue.extend(self.work)


class Stream:
    """See the module. Violations raise AssertionError, those of queued work when the queue gets there."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.queue: list[Work] = []
        self._capturing: Captured | None = None
        self._owners: dict[int, tuple[Context, Any]] = {}  # contexts that captured calls hold for ever

    def outside_a_capture(self, what: str) -> None:
        """Refuse what a stream cannot do while it captures."""
        assert self._capturing is None, f"{what} while the stream is capturing"

    def enqueue(self, work: Work, up: int = 0, pinned: bool = False) -> None:
        """Put one call, copy or upload of `up` bytes at the end of the queue, or into the capture."""
        if self._capturing is not None:
            assert pinned or not up, "a transfer from pageable memory cannot be captured"
            self._capturing.work.append(work)
            return
        self.counts.enqueues += 1
        self.counts.bytes_up += up
        self.queue.append(work)

    def hold(self, context: Context, call: Any) -> None:
        """A captured call keeps its execution context to itself."""
        if self._capturing is not None:
            _, owner = self._owners.setdefault(id(context), (context, call))
            assert owner is call, f"two captured calls of {context.graph} share an execution context"

    def synchronise(self) -> None:
        """Do everything that is queued."""
        self.outside_a_capture("synchronising")
        self.counts.synchronisations += 1
        self.drain()

    def drain(self) -> None:
        """Like `synchronise`, uncounted: for the checks at the end of a test."""
        work, self.queue = self.queue, []
        for item in work:
            item()

    def discard(self) -> None:
        """Forget what is queued, for instance after a violation."""
        self.queue, self._capturing = [], None

    @contextmanager
    def capture(self) -> Iterator[Captured]:
        """Collect what is enqueued inside instead of doing it."""
        self.outside_a_capture("another capture")
        captured = self._capturing = Captured(self)
        try:
            yield captured
        finally:
            self._capturing = None
