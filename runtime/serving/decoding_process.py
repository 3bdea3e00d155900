"""A process that decodes for a server: a session and its scheduler, asked over a socket.

The server is another process, so that its work on connections and JSON never holds up a cycle. This one ends when the server
says so, and when the server is gone.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..common.errors import VlmexportError
from ..common.foreign_errors import raise_if_foreign
from ..families import RawPrompt
from ..sampling.logprobs import Logprobs, TokenLogprob
from ..session.result import Result
from ..session.session import Session
from ..speedup.stats import Stats
from ..text.token_bytes import token_bytes
from ..text.tokenizer import Tokenizer
from .messages import (
    TO_PROCESS,
    Answer,
    Ask,
    Cancel,
    Close,
    Counts,
    Ended,
    Entry,
    Failure,
    Load,
    Loaded,
    Text,
    Token,
    ToProcess,
    Unframer,
    frame,
)
from .scheduler import Scheduler
from .ticket import Ticket

CHUNK = 1 << 18


class Outbox:
    """Sends messages by a thread of its own, whatever is there in one frame: decoding never waits for a socket."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vlmexport-outbox", daemon=True)
        self._thread.start()
        self.put = self._queue.put

    def close(self) -> None:
        """Send what is left."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        open_ = True
        while open_:
            messages = [self._queue.get()]
            while not self._queue.empty():
                messages.append(self._queue.get_nowait())
            if messages[-1] is None:
                open_ = False
                messages.pop()
            try:
                self._connection.sendall(frame(messages))
            except OSError as error:  # the server is gone: whoever reads from it sees that, too
                raise_if_foreign(error)
                return


def spell(tokenizer: Tokenizer, token: int, logprob: float) -> Token:
    """A token as an answer shows it."""
    data = token_bytes(tokenizer, token)
    return data.decode("utf-8", "replace"), data, logprob


def entry_of(tokenizer: Tokenizer, noted: TokenLogprob) -> Entry:
    """A token's log-probability with the texts of the tokens."""
    top = [spell(tokenizer, *each) for each in noted.top]
    return Entry(spell(tokenizer, noted.token, noted.logprob), top, noted.drafted)


def counts_of(stats: Stats, queue_seconds: float) -> Counts:
    """What an answer says of its decoding."""
    drafting = {shape: count for shape, count in stats.shapes.items() if shape[0]}
    return Counts(
        stats.prompt_tokens,
        stats.reused_tokens,
        stats.tokens,
        stats.accepted,
        stats.proposed,
        sum(drafting.values()),
        max((depth for _, depth in drafting), default=0),
        stats.accepted_by_depth,
        queue_seconds,
        stats.time_to_first_token,
        stats.total_seconds,
    )


def failure_of(error: BaseException) -> Failure:
    """Of an error of ours its message, of another its kind, too."""
    kind = type(error).__name__
    return Failure(kind, str(error) if isinstance(error, VlmexportError) else f"{kind}: {error}")


class Desk:
    """Hands the requests of a server to a scheduler, and what comes of them to the outbox."""

    def __init__(self, scheduler: Scheduler, outbox: Outbox):
        self._scheduler, self._outbox = scheduler, outbox
        self._tokenizer = scheduler.session.bundle.tokenizer
        self._tickets: dict[int, Ticket] = {}

    def take(self, message: Ask | Cancel) -> None:
        """A word of the server's."""
        if isinstance(message, Ask):
            self._ask(message)
        elif (ticket := self._tickets.get(message.id)) is not None:
            ticket.cancel()

    def _ask(self, message: Ask) -> None:
        request, number, put = dict(message.request), message.id, self._outbox.put
        noted = None if message.top is None else Logprobs(message.top)
        sent = 0

        def entries() -> list[Entry]:
            nonlocal sent
            if noted is None:
                return []
            new, sent = noted.entries[sent:], len(noted.entries)
            return [entry_of(self._tokenizer, each) for each in new]

        def ended(ticket: Ticket) -> None:
            self._tickets.pop(number, None)
            put(Ended(number, outcome_of(ticket, entries)))

        if message.raw:
            request["prompt"] = RawPrompt(request["prompt"])
        if noted is not None:
            request["logprobs"] = noted
        on_text = (lambda text: put(Text(number, text, entries()))) if message.streamed else None
        try:
            ticket = self._scheduler.submit(request, on_text, streamed=message.streamed)
        except Exception as error:
            raise_if_foreign(error)
            put(Ended(number, failure_of(error)))
            return
        self._tickets[number] = ticket
        ticket.add_done_callback(ended)


def outcome_of(ticket: Ticket, entries: Any) -> Answer | Failure:
    """Of a request that has ended."""
    try:
        result: Result = ticket.result(0)
    except Exception as error:
        raise_if_foreign(error)
        return failure_of(error)
    waited = 0.0 if ticket.began is None else ticket.began - ticket.arrived
    return Answer(result.text, result.finish_reason, counts_of(result.stats, waited), entries())


def incoming(connection: socket.socket) -> Iterator[ToProcess]:
    """The server's messages, until it is gone."""
    unframer = Unframer(TO_PROCESS)
    with contextlib.suppress(OSError):
        while data := connection.recv(CHUNK):
            yield from unframer.take(data)


def serve(connection: socket.socket) -> None:
    """Load what the first message says, and answer until the last one."""
    messages = incoming(connection)
    load = next(messages, None)
    if not isinstance(load, Load):  # the server ended meanwhile
        return
    outbox = Outbox(connection)
    try:
        kernels = load.loading.pop("kernel_cache", None)
        session = Session.load(load.bundle, **load.loading, kernel_cache=kernels and Path(kernels))
    except Exception as error:
        raise_if_foreign(error)
        outbox.put(failure_of(error))
        outbox.close()
        return
    with session:
        manifest, drain = session.bundle.manifest, 0.0
        scheduler = Scheduler(session, load.max_waiting, load.prefills_per_cycle)
        outbox.put(
            Loaded(
                manifest.model.source,
                manifest.model.fingerprint or "",
                bool(manifest.text.chat_template),
                session.max_batch,
                session.max_length,
                session.note,
            )
        )
        desk = Desk(scheduler, outbox)
        try:
            for message in messages:
                if isinstance(message, Close):
                    drain = message.drain
                    break
                assert not isinstance(message, Load), "loaded already"
                desk.take(message)
                if scheduler.closed:  # an error ended it: another process is better
                    break
        finally:
            scheduler.close(drain)
            outbox.close()


def main() -> None:
    """The program; its argument is the socket's descriptor."""
    # A terminal sends Ctrl-C to both processes, a supervisor SIGTERM: the server says what follows from it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        serve(connection)
