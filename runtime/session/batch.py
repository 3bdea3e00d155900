"""Requests that are decoded together: each is taken when there is room for it, and handed out when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.errors import InputError, NumericsError, OptionError
from ..speculative.cycle import Cycle
from ..speedup.stats import Stats
from .active_request import ActiveRequest, Delivery
from .inputs import NAMES, RequestInputs
from .request import Settings
from .request_options import RequestOptions
from .result import Result
from .stream import start_request

if TYPE_CHECKING:
    from ..speculative.sequence import Sequence
    from .session import Session

Outcome = Result | InputError | NumericsError


@dataclass(frozen=True)
class WaitingRequest:
    """A request that waits for a place in the batch, its options checked."""

    number: int
    inputs: RequestInputs
    options: RequestOptions
    settings: Settings
    delivery: Delivery


def each_request(requests: Iterable[Any]) -> Iterator[Any]:
    """Raises `OptionError` for what is no list or iterator of requests."""
    if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
        raise OptionError(f"requests: {requests!r:.80} is no list or iterator of requests")
    return iter(requests)


def check_request(
    number: int,
    request: Any,
    delivery: Delivery,
    resolve: Callable[[Mapping[str, Any]], tuple[RequestOptions, Settings]],
) -> WaitingRequest:
    """A request of a batch with its options checked. Raises `OptionError` with its number."""
    if not isinstance(request, Mapping):
        raise OptionError(f"requests[{number}]: {request!r:.80} is not a mapping of options")
    named = {name: value for name, value in request.items() if name in NAMES}
    try:
        inputs = RequestInputs.of(**named)
        options, settings = resolve({name: request[name] for name in request if name not in named})
    except OptionError as error:
        raise OptionError(f"requests[{number}]: {error}") from None
    return WaitingRequest(number, inputs, options, settings, delivery)


def run_batch(session: Session, waiting: Iterator[WaitingRequest]) -> Iterator[tuple[int, Outcome]]:
    """Requests, a batch at a time: (number, result) of each when it has finished."""
    session.take_cached()
    session.decoder.reset(0)
    cycle = Cycle(session.decoder)
    active: dict[Sequence, tuple[int, ActiveRequest]] = {}

    def let_go(sequence: Sequence) -> tuple[int, Outcome]:
        number, running = active.pop(sequence)
        _exhaust(running.last())
        cycle.leave(sequence)
        result = running.close()
        return number, sequence.error or result

    try:
        waits = (
            True  # Python 3.11 does not see a `try` that begins with a loop, where a signal comes as it turns
        )
        while waits:
            for sequence in [s for s in active if s.finish_reason is not None or s.interrupted()]:
                yield let_go(sequence)
            while len(active) < session.max_batch and (taken := next(waiting, None)) is not None:
                if taken.delivery.cancelled():
                    yield taken.number, Result("", [], "cancelled", Stats())
                    continue
                try:
                    prepared = session._prepare(taken.inputs, taken.options)
                    running = start_request(session, prepared, taken.settings, taken.delivery)
                except (InputError, NumericsError) as error:
                    yield taken.number, error
                    continue
                cycle.join(running.sequence)
                active[running.sequence] = (taken.number, running)
                _exhaust(running.start())
                if running.sequence.finish_reason is not None:
                    yield let_go(running.sequence)
            if not active:
                return
            for sequence, tokens in zip(list(cycle.sequences), cycle.run(), strict=True):
                _exhaust(active[sequence][1].take(tokens))
    finally:
        for _, running in active.values():  # an error, or the caller, ended the batch
            running.end_proposer()


def _exhaust(pieces: Iterator[str]) -> None:
    for _ in pieces:
        pass
