"""One request of a scheduler, as who asked for it sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..common.errors import OptionError
from ..common.foreign_errors import from_signal_handler
from ..session.result import Result

if TYPE_CHECKING:
    from ..families import Prepared
    from ..session.request import Settings
    from ..session.request_options import RequestOptions


@dataclass(frozen=True)
class Asked:
    """A request with its options checked."""

    options: RequestOptions
    settings: Settings
    streamed: bool = True
    """Whether its text is handed out piece by piece."""


class Ticket:
    """A request that was accepted. Iterate for its text, or wait for its `result`; from any thread.

    Made by `Scheduler.submit`.
    """

    def __init__(
        self,
        asked: Asked,
        arrived: float,
        on_text: Callable[[str], object] | None,
        changed: Callable[[], None],
    ):
        self.asked, self.arrived = asked, arrived
        """When it came: `time.perf_counter`."""
        self.began: float | None = None
        """When it got a place, by the same clock; None: not yet."""
        deadline = asked.settings.deadline
        self.expires = None if deadline is None else arrived + deadline
        self.prepared: Prepared | None = None
        self._on_text, self._changed = on_text, changed
        self._pieces: SimpleQueue[str | None] = SimpleQueue()
        self._cancelled, self._done = threading.Event(), threading.Event()
        self._outcome: Result | BaseException | None = None
        self._callbacks: list[Callable[[Ticket], object]] = []
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """End the request after the current cycle, with finish reason `cancelled`. One that has ended stays as it is."""
        self._cancelled.set()
        self._changed()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Result:
        """Its result, once it has ended. Raises what ended it: `InputError`, `NumericsError`; and `TimeoutError` after
        `timeout` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"the request has not ended within {timeout:g} s")
        if isinstance(self._outcome, Result):
            return self._outcome
        assert self._outcome is not None
        raise self._outcome

    def __iter__(self) -> Iterator[str]:
        """Its text, one piece a cycle; once. Raises what ended it, as `result` does."""
        if self._on_text is not None:
            raise OptionError("the text of this request goes to its on_text; submit it without, and iterate")
        if not self.asked.streamed:
            raise OptionError(
                "this request is not streamed, its text is in the result; submit it with streamed=True"
            )
        while (piece := self._pieces.get()) is not None:
            yield piece
        self._pieces.put(None)  # for another iteration, which finds nothing
        self.result()

    def add_done_callback(self, call: Callable[[Ticket], object]) -> None:
        """Call `call(ticket)` when it has ended, in the scheduler's thread; at once where it has."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(call)
                return
        call(self)

    # --- for the scheduler ---

    def ended_early(self) -> Result | None:
        """What a request gives that was cancelled, or whose deadline passed, before it had a place."""
        if self.cancelled:
            return Result.unbegun("cancelled")
        if self.expires is not None and time.perf_counter() >= self.expires:
            return Result.unbegun("deadline")
        return None

    def push(self, text: str) -> None:
        """Hand out text. An exception of `on_text` ends the request, and is its outcome."""
        if self._on_text is None:
            self._pieces.put(text)
        elif self._outcome is None:
            try:
                self._on_text(text)
            except Exception as error:
                if from_signal_handler(error):
                    raise
                self._outcome = error
                self._cancelled.set()

    def finish(self, outcome: Result | BaseException) -> None:
        """It has ended. Again: does nothing."""
        with self._lock:
            if self._done.is_set():
                return
            if self._outcome is None:
                self._outcome = outcome
            self._done.set()
            callbacks, self._callbacks = self._callbacks, []
        self._pieces.put(None)
        for call in callbacks:
            call(self)
