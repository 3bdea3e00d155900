"""What goes back to Triton's clients: responses, sent by one thread, so that nobody who decodes waits for them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common.errors import BusyError, ClosedError, InputError, OptionError, VlmexportError
from ...common.foreign_errors import from_signal_handler

if TYPE_CHECKING:
    from ..ticket import Ticket

LOOK = 0.05
"""Seconds after which a client is looked for whose request gives no text: it waits, or its prompt is computed."""

log = logging.getLogger(__name__)


class Answer:
    """What one client is answered, response by response. `streamed`: a response for each piece of text, then the last one.

    `triton` is the module `triton_python_backend_utils`, `sender` the request's response sender.
    """

    def __init__(self, triton: Any, sender: Any):
        self._triton, self._sender = triton, sender
        self.streamed = False
        self.ticket: Ticket | None = None
        self.pieces: deque[str] = deque()
        self.ended = False
        """Whether the last response was sent."""
        self.looked = time.monotonic()
        """When its client was looked for."""

    def deliver(self) -> None:
        """Send the text that there is; where the request has ended, the last response."""
        if self.ended:
            return
        done = self.ticket is not None and self.ticket.done  # asked first: all text comes before the end
        text = "".join([self.pieces.popleft() for _ in range(len(self.pieces))])
        if done:
            self._send_last(text)
            return
        self.look()
        if self.streamed and text and not (self.ticket is not None and self.ticket.cancelled):
            self._sender.send(self._response(text))

    def look(self) -> None:
        """Cancel the request where its client has cancelled it, or has gone."""
        self.looked = time.monotonic()
        if self.ticket is not None and not self.ticket.cancelled and self._sender.is_cancelled():
            self.ticket.cancel()

    def refuse(self, error: BaseException) -> None:
        """Send an error as the last response."""
        self._end(self._error(code_of(self._triton.TritonError, error), _line(error)))

    def abandon(self, error: BaseException) -> None:
        """Nothing can be sent any more."""
        log.warning("a client cannot be answered: %s", _line(error))
        self.ended = True
        if self.ticket is not None:
            self.ticket.cancel()

    def _send_last(self, text: str) -> None:
        assert self.ticket is not None
        try:
            result = self.ticket.result(0)
        except Exception as error:
            if from_signal_handler(error):
                raise
            self.refuse(error)
            return
        if result.finish_reason == "cancelled":
            self._end(self._error(self._triton.TritonError.CANCELLED, "the request was cancelled"))
            return
        text = text if self.streamed else result.text
        stats = result.stats
        self._end(self._response(text, result.finish_reason, stats.tokens, stats.accepted))

    def _end(self, response: Any) -> None:
        self.ended = True
        self._sender.send(response, flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, text: str, reason: str = "", tokens: int = 0, accepted: int = 0) -> Any:
        values = {
            "text": np.array([text.encode(errors="replace")], object),
            "finish_reason": np.array([reason.encode()], object),
            "tokens": np.array([tokens], np.int32),
            "accepted": np.array([accepted], np.int32),
        }
        return self._triton.InferenceResponse([self._triton.Tensor(*each) for each in values.items()])

    def _error(self, code: int, message: str) -> Any:
        return self._triton.InferenceResponse(error=self._triton.TritonError(message, code))


def code_of(codes: Any, error: BaseException) -> int:
    """Triton's code for what ended a request; `codes` is the class `TritonError`."""
    if isinstance(error, InputError | OptionError):
        return codes.INVALID_ARG
    return codes.UNAVAILABLE if isinstance(error, BusyError | ClosedError) else codes.INTERNAL


def _line(error: BaseException) -> str:
    """In one line; an error that is not ours with its class."""
    line = (str(error).splitlines() or [""])[0]
    return line if isinstance(error, VlmexportError) else f"{type(error).__name__}: {line}"


class Delivery:
    """The thread that sends. It also finds out whose client has gone."""

    def __init__(self) -> None:
        self._changed: SimpleQueue[Answer | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vlmexport-triton-delivery", daemon=True)
        self._thread.start()

    def push(self, answer: Answer, text: str) -> None:
        """A piece of text has come. For any thread."""
        answer.pieces.append(text)
        self._changed.put(answer)

    def wake(self, answer: Answer) -> None:
        """Something has changed: it was accepted, or has ended. For any thread."""
        self._changed.put(answer)

    def close(self) -> None:
        """Return once everything that came before is sent."""
        self._changed.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_answers: set[Answer] = set()
        next_look = 0.0
        while True:
            with contextlib.suppress(Empty):
                wait = max(0.0, next_look - time.monotonic()) if open_answers else None
                answer = self._changed.get(timeout=wait)
                if answer is None:
                    return
                self._attempt(answer, answer.deliver)
                (open_answers.discard if answer.ended else open_answers.add)(answer)
            if (now := time.monotonic()) >= next_look:
                next_look = now + LOOK
                for answer in [each for each in open_answers if each.looked + LOOK <= now]:
                    self._attempt(answer, answer.look)

    def _attempt(self, answer: Answer, call: Any) -> None:
        """One client's failure is not the others'."""
        try:
            call()
        except Exception as error:
            if from_signal_handler(error):
                raise
            answer.abandon(error)
