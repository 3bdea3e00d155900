"""Requests that a session decodes together: each joins and leaves while the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.errors import InputError, NumericsError
from ..speculative.cycle import Cycle
from .active_request import ActiveRequest, Delivery
from .request import Settings
from .result import Result
from .stream import begin_request

if TYPE_CHECKING:
    from ..families import Prepared
    from ..speculative.sequence import Sequence
    from .session import Session

Outcome = Result | InputError | NumericsError


@dataclass(frozen=True)
class _Member:
    """A request of the batch, what its caller knows it by, and who gets its text."""

    key: Any
    running: ActiveRequest
    on_text: Callable[[str], object] | None

    def deliver(self, pieces: Iterator[str]) -> None:
        """The text of one cycle, in one piece."""
        text = "".join(pieces)
        if text and self.on_text is not None:
            self.on_text(text)


class ContinuousBatch:
    """At most `max_batch` requests of a session, which belongs to it until `close`.

    One request at a time begins: `begin`, then `prefill` until it says that nothing is left. `cycle` may run between two
    calls of `prefill`. `ended` hands out (key, outcome) of every request that is over.
    """

    def __init__(self, session: Session):
        self._session, self._decoder = session, session.decoder
        session.take_cached()
        session.decoder.reset(0)
        self._cycle = Cycle(session.decoder)
        self._active: dict[Sequence, _Member] = {}
        self._beginning: tuple[_Member, Iterator[None]] | None = None
        self._failed: list[tuple[Any, Outcome]] = []

    def __len__(self) -> int:
        """Requests that decode."""
        return len(self._active)

    @property
    def is_beginning(self) -> bool:
        """Whether a request has begun and decodes not yet."""
        return self._beginning is not None

    @property
    def next_part(self) -> str | None:
        """What `prefill` does next (`ActiveRequest.next_part`); None while no request begins."""
        return None if self._beginning is None else self._beginning[0].running.next_part

    @property
    def has_room(self) -> bool:
        """Whether another request may begin."""
        return self._beginning is None and len(self._active) < self._session.max_batch

    def begin(
        self,
        key: Any,
        prepared: Prepared,
        settings: Settings,
        delivery: Delivery,
        on_text: Callable[[str], object] | None = None,
    ) -> None:
        """Let a request begin. `on_text` receives the text of each cycle."""
        assert self.has_room, "no room for another request"
        running = begin_request(self._session, prepared, settings, delivery)
        self._beginning = _Member(key, running, on_text), running.prefill()

    def prefill(self, whole: bool = False) -> None:
        """The next part of the request that begins, or all that is left: its pictures, its encoder, a chunk of its prompt.
        Behind the last one it decodes."""
        while self._beginning is not None:
            member, parts = self._beginning
            sequence = member.running.sequence
            try:
                if not whole and sequence.interrupted():
                    parts.close()  # type: ignore[attr-defined]
                    self._leave(member, member.running.close(whole=False))  # it has no first token
                    return
                next(parts)
            except StopIteration:
                self._beginning = None
                self._cycle.join(sequence)
                self._active[sequence] = member
                member.deliver(member.running.start())
            except (InputError, NumericsError) as error:
                self._leave(member, error)
            if not whole:
                return

    def cycle(self) -> None:
        """One cycle of all requests that decode."""
        if self._active:
            sequences = list(self._cycle.sequences)
            for sequence, tokens in zip(sequences, self._cycle.run(), strict=True):
                member = self._active[sequence]
                member.deliver(member.running.take(tokens))

    def ended(self) -> Iterator[tuple[Any, Outcome]]:
        """(key, outcome) of each request that is over, whose place is free then."""
        while self._failed:
            yield self._failed.pop(0)
        for sequence in [s for s in self._active if s.finish_reason is not None or s.interrupted()]:
            member = self._active.pop(sequence)
            member.deliver(member.running.last())
            self._cycle.leave(sequence)
            result = member.running.close()
            yield member.key, sequence.error or result

    def close(self) -> None:
        """The drafts forget what still runs."""
        if self._beginning is not None:
            self._beginning[1].close()  # type: ignore[attr-defined]
            self._beginning[0].running.end_proposer()
        for member in self._active.values():
            member.running.end_proposer()

    def _leave(self, member: _Member, outcome: Outcome) -> None:
        self._beginning = None
        self._failed.append((member.key, outcome))
