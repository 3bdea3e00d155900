"""Requests that are decoded together: each is taken when there is room for it, and handed out when it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..common.errors import InputError, OptionError
from .active_request import Delivery
from .continuous_batch import ContinuousBatch, Outcome
from .inputs import NAMES, RequestInputs
from .request import Settings
from .request_options import RequestOptions
from .result import Result

if TYPE_CHECKING:
    from .session import Session


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


Resolve = Callable[[Mapping[str, Any]], tuple[RequestOptions, Settings]]


def checked(request: Any, resolve: Resolve) -> tuple[RequestInputs, RequestOptions, Settings]:
    """What a request gives, and its options checked. Raises `OptionError`."""
    if not isinstance(request, Mapping):
        raise OptionError(f"{request!r:.80} is not a mapping of options")
    named = {name: value for name, value in request.items() if name in NAMES}
    inputs = RequestInputs.of(**named)
    return inputs, *resolve({name: request[name] for name in request if name not in named})


def check_request(number: int, request: Any, delivery: Delivery, resolve: Resolve) -> WaitingRequest:
    """A request of a batch with its options checked. Raises `OptionError` with its number."""
    try:
        inputs, options, settings = checked(request, resolve)
    except OptionError as error:
        raise OptionError(f"requests[{number}]: {error}") from None
    return WaitingRequest(number, inputs, options, settings, delivery)


def run_batch(session: Session, waiting: Iterator[WaitingRequest]) -> Iterator[tuple[int, Outcome]]:
    """Requests, a batch at a time: (number, result) of each when it has finished."""
    batch = ContinuousBatch(session)
    try:
        waits = (
            True  # Python 3.11 does not see a `try` that begins with a loop, where a signal comes as it turns
        )
        while waits:
            yield from batch.ended()
            while batch.has_room and (taken := next(waiting, None)) is not None:
                if taken.delivery.cancelled():
                    yield taken.number, Result.unbegun("cancelled")
                    continue
                try:
                    prepared = session._prepare(taken.inputs, taken.options)
                except InputError as error:
                    yield taken.number, error
                    continue
                batch.begin(taken.number, prepared, taken.settings, taken.delivery)
                batch.prefill(whole=True)
                yield from batch.ended()
            if not batch:
                return
            batch.cycle()
    finally:
        batch.close()  # an error, or the caller, ended the batch
