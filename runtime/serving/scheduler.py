"""Continuous batching: requests come from any thread, and one thread decodes all of them together."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..common.errors import ClosedError, OptionError, QueueFullError, VlmexportError
from ..common.foreign_errors import from_signal_handler
from ..common.validation import integer
from ..session.batch import checked
from ..session.continuous_batch import ContinuousBatch
from ..session.inputs import in_colour_order
from .prefill_budget import PrefillBudget
from .ticket import Asked, Ticket

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..families.base import View
    from ..session.inputs import RequestInputs
    from ..session.session import Session

CLOSED = "the scheduler is closed; ask another one"
MOST_READERS = 4
"""Threads that decode pictures and lay out prompts: a picture may take 240 MB while it is decoded."""


class Scheduler:
    """Serves a session's requests from any thread; the session is its own until `close`.

    A request joins while others decode, and each has its own draft, seed, limits, deadline and end. Its pictures are decoded
    and its prompt is laid out by other threads; its prompt goes through the model in chunks, between the cycles of
    the others. What a request gives is what `Session.generate` gives for it, whoever comes or goes meanwhile (docs/
    contributing/rooms-and-rules.md, rule 1).
    """

    def __init__(self, session: Session, max_waiting: int = 64, prefills_per_cycle: int = 1):
        """`max_waiting`: requests that may wait for a place, beside the session's `max_batch` that have one.
        `prefills_per_cycle`: parts of prompts between two cycles, once two thirds of the places decode; more of them bring
        the first tokens of those who come sooner, and let those who decode stand still for longer.

        Raises `OptionError`, and `BusyError` while the session serves another call.
        """
        self.session = session
        self.max_waiting = integer("max_waiting", max_waiting, 0)
        self._budget = PrefillBudget(integer("prefills_per_cycle", prefills_per_cycle, 1))
        self._changed = threading.Condition()
        self._resolving = threading.Lock()
        self._ready: deque[Ticket] = deque()
        self._encodes: deque[tuple[View, float | None, Future[View]]] = deque()
        self._tickets: set[Ticket] = set()
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._readers = ThreadPoolExecutor(
            min(MOST_READERS, os.cpu_count() or 1), thread_name_prefix="vlmexport-prepare"
        )
        work = session._guarded(lambda _: self._work())([])
        next(work)  # raises `BusyError` here
        self._thread = self._start(work)
        atexit.register(self.close, 0)  # before Python ends a thread that is inside of the engine

    def submit(
        self,
        request: Mapping[str, Any],
        on_text: Callable[[str], object] | None = None,
        deadline: float | None = None,
        streamed: bool = True,
    ) -> Ticket:
        """Accept a request, a mapping of what `Session.generate` takes. Options are checked here.

        `on_text` receives its text, one piece a cycle, in the scheduler's thread: it must be short. `deadline`: seconds
        from now, waiting included; another word for the request's own. Not `streamed`: its text comes with the result alone,
        which is less work. A request whose pictures or prompt cannot be read
        ends with the `InputError`. Raises `OptionError`, `QueueFullError` where as many wait as may, and `ClosedError`
        behind `close`.
        """
        arrived = time.perf_counter()
        self._refuse_closed()
        if on_text is not None and not callable(on_text):
            raise OptionError(f"on_text: {on_text!r:.80} cannot be called")
        if deadline is not None and isinstance(request, Mapping):
            if request.get("deadline") is not None:
                raise OptionError("deadline is given twice, beside the request and in it; give one of them")
            request = {**request, "deadline": deadline}
        with self._resolving:
            inputs, options, settings = checked(request, self.session._resolve)
        ticket = Ticket(Asked(options, settings, streamed), arrived, on_text, self._wake)
        with self._changed:
            self._refuse_closed()
            if len(self._tickets) >= self.session.max_batch + self.max_waiting:
                raise QueueFullError(
                    f"{self.max_waiting} requests wait already; ask again later, or raise max_waiting"
                )
            self._tickets.add(ticket)
        self._readers.submit(self._prepare, ticket, inputs)
        return ticket

    def encode(self, image: Any, channels: str = "rgb", similar: float | None = None) -> View:
        """`Session.encode`, between two cycles."""
        session = self.session
        self._refuse_closed()
        with self._resolving:
            similar = session._resolve({"similar": similar})[0].similar
        view = session._family.view(session.bundle, in_colour_order([image], channels)[0])
        future: Future[View] = Future()
        with self._changed:
            self._refuse_closed()
            self._encodes.append((view, similar, future))
            self._changed.notify()
        return future.result()

    @property
    def running(self) -> int:
        """Requests that have a place, for which they do not wait any more."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests that wait for one."""
        return max(0, len(self._tickets) - self._running)

    @property
    def closed(self) -> bool:
        """Whether it accepts no more: it was closed, or an error ended it."""
        return self._closed

    def close(self, drain: float | None = None) -> None:
        """Accept no more, let what was accepted end, and give the session back. After `drain` seconds the rest is
        cancelled; None: never. Again: waits for the same."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(drain)
        if self._thread.is_alive():
            for ticket in list(self._tickets):
                ticket.cancel()
            self._thread.join()
        self._readers.shutdown()
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.close(drain=None if kind is None else 0)

    # --- private ---

    def _refuse_closed(self) -> None:
        if self._error is not None:
            raise VlmexportError(f"the scheduler ended: {self._error}") from self._error
        if self._closed or self.session._closed:
            raise ClosedError(CLOSED)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _prepare(self, ticket: Ticket, inputs: RequestInputs) -> None:
        """In a thread of the readers."""
        outcome: BaseException | Any = ticket.ended_early()
        if outcome is None:
            try:
                ticket.prepared = self.session._lay_out(inputs, ticket.asked.options)
            except BaseException as error:
                if from_signal_handler(error):  # which Python runs in the main thread alone
                    raise
                outcome = error
        if outcome is not None:
            self._end(ticket, outcome)
            return
        with self._changed:
            self._ready.append(ticket)
            self._changed.notify()

    def _end(self, ticket: Ticket, outcome: Any) -> None:
        with self._changed:
            self._tickets.discard(ticket)
            self._changed.notify()
        ticket.finish(outcome)

    def _start(self, work: Iterator[None]) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(work,), name="vlmexport-scheduler", daemon=True)
        thread.start()
        return thread

    def _run(self, work: Iterator[None]) -> None:
        """In a thread of its own, all of the decoding."""
        try:
            for _ in work:
                pass
        except BaseException as error:
            if from_signal_handler(error):
                raise
            self._error = error
        finally:
            with self._changed:
                self._closed = True
                left, encodes = list(self._tickets), list(self._encodes)
            for ticket in left:
                self._end(ticket, VlmexportError(f"the scheduler ended: {self._error}"))
            for *_, future in encodes:
                future.set_exception(ClosedError(CLOSED))

    def _work(self) -> Iterator[None]:
        """Yields before each cycle; the session is ours from the first time on."""
        batch = ContinuousBatch(self.session)
        try:
            while True:
                yield
                self._hand_out(batch)
                self._drop_ended()
                self._encode_one()
                self._prefill(batch)
                self._hand_out(batch)
                if batch:
                    batch.cycle()
                elif not batch.is_beginning and not self._wait():
                    return
        finally:
            batch.close()

    def _prefill(self, batch: ContinuousBatch) -> None:
        """Parts of prompts between two cycles."""
        free = self.session.max_batch - len(batch) - batch.is_beginning
        self._budget.begin(batch.is_beginning + min(len(self._ready), free), len(batch))
        while True:
            if batch.has_room and (ticket := self._next_ready()) is not None:
                self._begin(batch, ticket)
            if (part := batch.next_part) is None or not self._budget.allows(part):
                return
            begin = time.perf_counter()
            batch.prefill()
            self._budget.count(part, time.perf_counter() - begin)

    def _hand_out(self, batch: ContinuousBatch) -> None:
        for ticket, outcome in batch.ended():
            self._running -= 1
            self._end(ticket, outcome)

    def _drop_ended(self) -> None:
        """End those that wait for a place and do not want it any more."""
        with self._changed:
            if self.session._closed:
                for ticket in self._ready:
                    ticket.cancel()
            over = [(ticket, early) for ticket in self._ready if (early := ticket.ended_early()) is not None]
            for ticket, _ in over:
                self._ready.remove(ticket)
        for ticket, early in over:
            self._end(ticket, early)

    def _encode_one(self) -> None:
        with self._changed:
            if not self._encodes:
                return
            view, similar, future = self._encodes.popleft()
        session = self.session
        try:
            future.set_result(session._pictures.encoded_view(session.decoder, view, similar))
        except Exception as error:
            if from_signal_handler(error):
                raise
            future.set_exception(error)

    def _next_ready(self) -> Ticket | None:
        with self._changed:
            return self._ready.popleft() if self._ready else None

    def _begin(self, batch: ContinuousBatch, ticket: Ticket) -> None:
        session, prepared, asked = self.session, ticket.prepared, ticket.asked
        assert prepared is not None
        ticket.prepared, ticket.began = None, time.perf_counter()
        self._running += 1
        delivery = replace(
            session._delivery(asked.streamed),
            begin=ticket.arrived,
            cancelled=lambda: ticket.cancelled or session._closed,
        )
        prepared = session._pictures.recall_all(prepared, asked.options.similar)
        batch.begin(ticket, prepared, asked.settings, delivery, ticket.push if asked.streamed else None)

    def _wait(self) -> bool:
        """Until there is something to do; False where there will be nothing any more."""
        with self._changed:
            while not (self._ready or self._encodes):
                if self._closed and not self._tickets:
                    return False
                self._changed.wait()
        return True
