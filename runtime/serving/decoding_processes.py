"""The decoding processes of a server, as its event loop sees them."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ..common.errors import LostProcessError, QueueFullError, VlmexportError
from .messages import (
    FROM_PROCESS,
    Ask,
    Cancel,
    Close,
    Ended,
    Failure,
    Load,
    Loaded,
    Text,
    ToProcess,
    Unframer,
    frame,
)

log = logging.getLogger(__name__)

PROGRAM = f"from {__package__}.decoding_process import main; main()"
"""Not `-m`: errors of a module that is called `__main__` do not count as ours."""
LOST = Failure(LostProcessError.__name__, "the process that decoded this request ended; ask again")
SOON = 30.0
"""Seconds: a process that ends so soon after it was ready is not started again."""


class Inbox:
    """What processes say of the requests of one client, which are numbered from 0."""

    def __init__(self) -> None:
        self._messages: list[tuple[int, Text | Ended]] = []
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> list[tuple[int, Text | Ended]]:
        """What came since the last call: (number, message), at least one."""
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        messages, self._messages = self._messages, []
        return messages

    def put(self, number: int, message: Text | Ended) -> None:
        """For the processes. `Ended` is the last message of a number."""
        self._messages.append((number, message))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Asked:
    """A request that a process serves."""

    def __init__(self, process: DecodingProcess, key: int, inbox: Inbox, number: int):
        self._process, self._key, self._inbox, self._number = process, key, inbox, number

    def cancel(self) -> None:
        """End it after the current cycle; `Ended` comes. One that has ended stays as it is."""
        self._process.send(Cancel(self._key))

    def receive(self, message: Text | Ended) -> None:
        """For the process."""
        self._inbox.put(self._number, message)


class DecodingProcess(asyncio.Protocol):
    """One process, and the requests that it serves."""

    def __init__(self) -> None:
        self._unframer = Unframer(FROM_PROCESS)
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next = 0
        self._first: asyncio.Future[Loaded | Failure] = asyncio.get_running_loop().create_future()
        self.asked: dict[int, Asked] = {}
        """Requests by number, until they have ended."""
        self.loaded: Loaded | None = None
        """What it said when it was ready; None before, and once it has ended."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when it ends and nobody told it to."""
        self._closing = False

    async def start(self, load: Load) -> Loaded:
        """Start it, and wait until it is ready. Raises `VlmexportError` with what it says of the bundle."""
        ours, its = socket.socketpair()
        try:
            with its:
                command = [sys.executable, "-c", PROGRAM, str(its.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
            await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        self.send(load)
        first = await self._first
        if isinstance(first, Failure):
            raise VlmexportError(first.message)
        self.loaded = first
        return first

    def ask(self, inbox: Inbox, number: int, request: dict[str, Any], **how: Any) -> Asked:
        """Send a request, the `number`th of an inbox; `how`: other fields of `messages.Ask`."""
        self._next += 1
        asked = self.asked[self._next] = Asked(self, self._next, inbox, number)
        self.send(Ask(self._next, request, **how))
        return asked

    def send(self, message: ToProcess) -> None:
        """A word to the process, unless it has ended."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame([message]))

    async def close(self, drain: float) -> None:
        """Let it end what it serves, after `drain` seconds at once."""
        self._closing = True
        self.send(Close(drain))
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, drain + 10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        if self._transport is not None:
            self._transport.close()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._unframer.take(data):
            if isinstance(message, Text | Ended):
                number = message.id
                asked = self.asked[number]
                if isinstance(message, Ended):
                    del self.asked[number]
                asked.receive(message)
            else:
                self._first.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.loaded = None
        if not self._first.done():
            self._first.set_result(Failure(LostProcessError.__name__, self._last_words()))
        asked, self.asked = self.asked, {}
        for number, each in asked.items():
            each.receive(Ended(number, LOST))
        if not self._closing:
            if self._process is not None:
                self._process.kill()  # it may have closed the socket alone
                self._process.wait()
            self.on_lost()

    def _last_words(self) -> str:
        status = None if self._process is None else self._process.wait()
        return f"the process that was to load the bundle ended with status {status}"


class DecodingProcesses:
    """Processes that serve the same bundle; a request goes to the one that has fewest."""

    def __init__(self, load: Load, count: int = 1):
        self._load, self._count = load, count
        self._processes: list[DecodingProcess] = []
        self._starting: set[asyncio.Task[None]] = set()
        self.info: Loaded | None = None
        """What the first one said when it was ready."""
        self.failed = asyncio.Event()
        """Set when a process ended again right after it was ready: there is no use in starting it once more."""
        self.restarts = 0
        """Processes that were started in place of one that ended."""

    async def start(self) -> Loaded:
        """Start all of them. Raises `VlmexportError`."""
        first = (
            await self._start()
        )  # the others read files that lie in memory then, and one says what is wrong
        self.info = first
        await asyncio.gather(*(self._start() for _ in range(self._count - 1)))
        return first

    @property
    def ready(self) -> list[DecodingProcess]:
        """Those that take requests."""
        return [each for each in self._processes if each.loaded is not None]

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return sum(len(each.asked) for each in self._processes)

    @property
    def running(self) -> int:
        """Of these, those for which there is a place."""
        limit = self.info.max_batch if self.info is not None else 0
        return sum(min(len(each.asked), limit) for each in self._processes)

    @property
    def capacity(self) -> int:
        """Requests that one process accepts."""
        assert self.info is not None
        return self.info.max_batch + self._load.max_waiting

    def check_room(self, count: int = 1) -> None:
        """Raises `QueueFullError` unless so many more requests are accepted, and `LostProcessError` while no process is ready."""
        ready = self.ready
        if not ready:
            raise LostProcessError("no process is ready to decode; ask again later")
        accepted = self.capacity * len(ready)
        if accepted - sum(len(each.asked) for each in ready) < count:
            raise QueueFullError(
                f"{accepted} requests may run and wait, and {count} more do not fit; ask again later, or start with a larger "
                "--max-waiting"
            )

    def ask(self, inbox: Inbox, number: int, request: dict[str, Any], **how: Any) -> Asked:
        """Send a request to the process that has fewest; `check_room` said that there is one."""
        process = min(self.ready, key=lambda each: len(each.asked))
        return process.ask(inbox, number, request, **how)

    async def close(self, drain: float = 0.0) -> None:
        """End all of them."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*(each.close(drain) for each in self._processes))

    async def _start(self) -> Loaded:
        process = DecodingProcess()
        self._processes.append(process)
        loaded = await process.start(self._load)
        began = time.monotonic()
        process.on_lost = lambda: self._replace(process, began)
        return loaded

    def _replace(self, process: DecodingProcess, began: float) -> None:
        self._processes.remove(process)
        if time.monotonic() - began < SOON and self.restarts:
            log.error("a process that decodes ended again right after its start; the server ends")
            self.failed.set()
            return
        log.error("a process that decodes ended; another one is started")
        self.restarts += 1
        task = asyncio.get_running_loop().create_task(self._start_again())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_again(self) -> None:
        try:
            await self._start()
        except VlmexportError as error:
            log.error("%s", error)
            self.failed.set()
