"""One client's request while processes decode its choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ..decoding_processes import Asked, Inbox
from ..messages import Answer, Ended, Entry, Failure, Text
from .answers import DONE, Form, event
from .errors import RequestError, draining, error_of
from .metrics import Metrics


class Gone(Exception):
    """The client went away."""


class Conversation:
    """The choices that a client waits for."""

    def __init__(self, names: dict[str, str]):
        """`names`: option → the client's word for it, for errors."""
        self.inbox, self.asked, self._names = Inbox(), list[Asked](), names
        self.gone = False
        """Whether the client went away."""
        self._first: list[tuple[int, Text | Ended]] = []
        self._watching: asyncio.Task[None] | None = None

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """End all choices when the client goes away: `receive` returns then, since it has the whole body."""

        async def wait() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone = True
            self.cancel()

        self._watching = asyncio.get_running_loop().create_task(wait())

    def cancel(self) -> None:
        """End all choices after the current cycle."""
        for asked in self.asked:
            asked.cancel()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._watching is not None:
            self._watching.cancel()
        self.cancel()

    async def begin(self) -> None:
        """Wait for the first word. Raises `RequestError` where that is an error: a stream has not begun, so that the response may
        still be an error; and `Gone`."""
        self._first = await self.inbox.next()
        for _, message in self._first:
            if isinstance(message, Ended):
                self._checked(message)

    async def parts(self) -> AsyncGenerator[list[tuple[int, Text | Answer]], None]:
        """(choice, piece of its text or its answer), as they come, until all have ended. Raises `RequestError`, `Gone`."""
        left = len(self.asked)
        try:
            while left:
                messages, self._first = self._first or await self.inbox.next(), []
                found: list[tuple[int, Text | Answer]] = []
                for number, message in messages:
                    if isinstance(message, Text):
                        found.append((number, message))
                    else:
                        found.append((number, self._checked(message)))
                        left -= 1
                yield found
        finally:
            self.close()

    async def answers(self) -> list[Answer]:
        """Of all choices. Raises `RequestError`, `Gone`."""
        answers: dict[int, Answer] = {}
        async for parts in self.parts():
            answers |= {number: part for number, part in parts if isinstance(part, Answer)}
        return [answers[number] for number in range(len(self.asked))]

    def _checked(self, message: Ended) -> Answer:
        outcome = message.outcome
        if self.gone:
            raise Gone
        if isinstance(outcome, Failure):
            raise error_of(outcome, self._names)
        if outcome.finish_reason == "cancelled":  # not by its client: the server ends
            raise draining()
        if outcome.finish_reason == "deadline" and not outcome.counts.tokens:
            raise RequestError(
                "deadline: it passed while the request waited",
                504,
                "server_error",
                "deadline",
                "deadline_exceeded",
            )
        return outcome


async def stream(conversation: Conversation, form: Form, metrics: Metrics) -> AsyncGenerator[bytes, None]:
    """The events of an answer: those that came together as one piece of data, the pieces of a choice as one event."""
    answers: dict[int, Answer] = {}
    try:
        async for parts in conversation.parts():
            data = b""
            waiting: dict[int, tuple[str, list[Entry]]] = {}
            for number, part in parts:
                if isinstance(part, Text):
                    text, entries = waiting.get(number, ("", []))
                    waiting[number] = text + part.text, [*entries, *part.entries]
                    continue
                if number in waiting:
                    data += form.piece(number, *waiting.pop(number))
                data += form.last(number, part)
                answers[number] = part
                metrics.count(part)
            for number, piece in waiting.items():
                data += form.piece(number, *piece)
            yield data
        yield form.usage([answers[number] for number in sorted(answers)]) + DONE
    except RequestError as error:
        metrics.count_error(error.status)
        yield event(error.body) + DONE
    except Gone:
        metrics.count_error(499)
