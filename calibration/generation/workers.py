"""Processes that decode side by side, each with a session of its own: threads of one would share its interpreter."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from ...runtime.common.errors import VlmexportError
from . import worker
from .answers import GenerationOptions
from .decoding import Ask, Outcome
from .messages import Failure, Start, Wave


class Workers:
    """Started when there is work for them, and kept until `close`, or until this object is gone; a call that does not
    come to its end, for whatever reason, ends them. They end by themselves when this process does.

    Args:
        most: processes. start: what each loads.
    """

    def __init__(self, most: int, start: Start) -> None:
        self._most, self._start = most, start
        self._running: list[_Process] = []
        self._busy, self._closed = threading.Lock(), False
        weakref.finalize(self, _end, self._running)

    def waves(
        self, asked: Sequence[Ask], waves: Sequence[range], options: GenerationOptions
    ) -> Generator[tuple[int, Outcome], None, None]:
        """What comes of each of `asked`, with its place, as soon as it is there. Each wave is decoded by one process.

        Raises:
            VlmexportError: a process was ended from outside, or cannot be started; another call is not over; this is
            closed. What a process raised is raised here, with its traceback as the cause.
        """
        if not self._busy.acquire(blocking=False):
            raise VlmexportError("these processes are busy with other records; close that iterator first")
        done = False
        try:
            yield from self._decode(asked, waves, options)
            done = True
        finally:
            if self._closed or not done:
                _end(self._running)
            self._busy.release()

    def close(self) -> None:
        """End the processes. A call that is running ends with an error."""
        self._closed = True
        for process in list(self._running):
            process.popen.kill()
        if self._busy.acquire(blocking=False):
            _end(self._running)
            self._busy.release()

    def _decode(
        self, asked: Sequence[Ask], waves: Sequence[range], options: GenerationOptions
    ) -> Generator[tuple[int, Outcome], None, None]:
        if self._closed:
            raise VlmexportError("these processes are closed; open the bundle again")
        for _ in range(len(self._running), min(self._most, len(waves))):
            self._running.append(_Process.begin(self._start))
        left, folder = iter(waves), _folder()
        decoding: dict[Connection, tuple[_Process, range]] = {}

        def hand_out(process: _Process) -> None:
            if (wave := next(left, None)) is not None:
                decoding[process.connection] = process, wave
                self._send(process, Wave(list(asked[wave.start : wave.stop]), options, folder))

        for process in self._running:
            hand_out(process)
        while decoding:
            for connection in wait(list(decoding)):
                process, wave = decoding[connection]  # type: ignore[index]
                message = self._receive(process)
                if message is None:
                    del decoding[process.connection]
                    hand_out(process)
                elif isinstance(message, Failure):
                    raise message.error from _Trace(f"\n{message.trace}")
                elif isinstance(message, logging.LogRecord):
                    logging.getLogger(message.name).handle(message)
                else:
                    place, outcome = message
                    yield wave[place], outcome

    def _send(self, process: _Process, wave: Wave) -> None:
        try:
            process.connection.send(wave)
        except OSError as error:
            raise self._gone(process) from error

    def _receive(self, process: _Process) -> Any:
        try:
            return process.connection.recv()
        except (EOFError, OSError) as error:
            raise self._gone(process) from error

    def _gone(self, process: _Process) -> VlmexportError:
        """What to say of a process whose socket has ended."""
        if self._closed:
            return VlmexportError("these processes were closed while they decoded; open the bundle again")
        return VlmexportError(
            f"process {process.popen.pid}, one of {len(self._running)} that decoded, {process.ending()}; "
            "--threads 1 decodes in one process, which needs less memory"
        )


class _Trace(Exception):
    """The traceback of an error that came from another process."""


@dataclass(frozen=True)
class _Process:
    popen: subprocess.Popen[bytes]
    connection: Connection

    @classmethod
    def begin(cls, start: Start) -> _Process:
        """A worker that imports from where this process does. Not by `multiprocessing`: its children would run the
        user's script again (spawn), or begin with ONNX Runtime's locks as some thread holds them (fork).

        Raises:
            VlmexportError: the system has no process, file or memory left for it.
        """
        path = os.pathsep.join(entry or os.curdir for entry in sys.path)
        try:
            ours, theirs = Pipe()
            with theirs:
                popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", worker.__name__],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,  # the user's is for results
                    start_new_session=True,  # Ctrl-C of the terminal is for the parent, which ends its children
                )
        except OSError as error:
            raise VlmexportError(
                f"no process can be started to decode in ({error.strerror or error}); --threads 1 needs none"
            ) from error
        with suppress(OSError):  # it has ended already: the first wave finds out
            ours.send(start)
        return cls(popen, ours)

    def ending(self) -> str:
        """How it ended, once its socket has."""
        try:
            status = self.popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its socket and hangs"
        if status >= 0:
            return f"ended with status {status}, its message is above"
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"


def _end(processes: list[_Process]) -> None:
    """End them all, at once, and wait until they have."""
    for process in processes:
        process.popen.kill()
    for process in processes:
        process.popen.wait()
        process.connection.close()
    processes.clear()


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return None
