"""One request by itself: the stream that hands out its text, and the loop behind it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from ..common.errors import BusyError, VlmexportError
from ..families import Prepared
from ..speculative.cycle import Cycle
from .active_request import ActiveRequest, Delivery
from .prefix_cache import CachedRequest, snapshot
from .request import Settings
from .result import Result

if TYPE_CHECKING:
    from .session import Session


class Stream:
    """Iterate for pieces of text, each as soon as it is certain; `result` is there when the iteration is over.

    `close` (or leaving the loop) ends the request; its finish reason is then `cancelled`.
    """

    def __init__(
        self, pieces: Callable[[list[Result]], Generator[str, None, None]], lossy: str | None = None
    ):
        # The generator gets the list, not the stream: a cycle would keep a dropped stream's request running.
        self._results: list[Result] = []
        self._pieces = pieces(self._results)
        self._lossy = lossy

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece. Raises `BusyError` while another thread waits for it, and what ended the request."""
        try:  # no context manager: it costs a microsecond a piece, and the end of an iteration would pass through it
            return next(self._pieces)
        except ValueError as error:
            _refuse_second_reader(error)
            raise

    @property
    def lossy(self) -> str | None:
        """ "typical" where drafts are accepted that way: known before the first piece. Once the stream has ended what
        `result.lossy` says, which knows of similar pictures, too."""
        return self._results[0].lossy if self._results else self._lossy

    def close(self) -> None:
        """End the request now. Raises `BusyError` while another thread waits for a piece."""
        try:
            self._pieces.close()
        except ValueError as error:
            _refuse_second_reader(error)
            raise

    @property
    def result(self) -> Result:
        """The whole result. Raises `VlmexportError` while the stream is still running, and where there is none."""
        if self._results:
            return self._results[0]
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_CLOSED:
            raise VlmexportError("the stream has no result: it failed, or was closed before it began")
        raise VlmexportError("the stream is not finished; iterate it to its end, or close it, first")


def _refuse_second_reader(error: ValueError) -> None:
    """`BusyError` for what Python says of a generator that two threads run."""
    if str(error) == "generator already executing":
        raise BusyError(
            "another thread is waiting for the next piece of this stream; end the request with Session.cancel"
        ) from None


def begin_request(
    session: Session, prepared: Prepared, settings: Settings, delivery: Delivery, alone: bool = False
) -> ActiveRequest:
    """A request for the next place of the batch, not prefilled yet. One that is `alone` may go on behind what the cache
    holds."""
    proposer = None if settings.draft is None else session.proposer(settings.draft.name)
    reused, cached = 0, session.take_cached()
    if alone:
        if settings.reuse_prompt and cached is not None:
            reused = cached.resume(prepared, proposer, session.decoder.states.length(0))
        if not reused:
            session.decoder.reset(0)
    return ActiveRequest(session.bundle, session.decoder, prepared, settings, proposer, delivery, reused)


def run_alone(
    session: Session, results: list[Result], prepared: Prepared, settings: Settings, delivery: Delivery
) -> Iterator[str]:
    """One request; its pieces of text. Its result is appended to `results`."""
    decoder = session.decoder
    running = begin_request(session, prepared, settings, delivery, alone=True)
    for _ in running.prefill():
        pass
    sequence, cycle = running.sequence, Cycle(decoder)
    cycle.join(sequence)
    pieces, whole = running.start(), False
    try:
        yield from pieces
        while sequence.finish_reason is None and not sequence.interrupted():
            pieces = running.take(cycle.run()[0])
            if sequence.error is not None:
                raise sequence.error
            yield from pieces
        yield from running.last()
        whole = True
    except GeneratorExit:  # closed between two cycles
        whole = True
        raise
    finally:
        pieces.close()  # type: ignore[attr-defined]  # counts what a closed stream leaves
        results.append(running.close(whole))
        if settings.reuse_prompt and whole and sequence.error is None:
            encoded = decoder.encoder is not None
            length = len(prepared.token_ids) if encoded else decoder.arena.lengths[0]
            prefix = snapshot(prepared, sequence.tokens, length)
            session.keep_cached(CachedRequest(prefix, sequence.proposer, encoded))
