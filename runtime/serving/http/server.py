"""Runs the server: sockets, signals, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import stat
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

from ...common.errors import LostProcessError, OptionError
from ...common.foreign_errors import raise_if_foreign
from ..decoding_processes import DecodingProcesses
from ..messages import Load
from .app import Api, ApiOptions

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

POLL = 0.02
"""Seconds between two looks at whether it listens, and at what is left while it drains."""


@dataclass(frozen=True)
class Place:
    """Where the server listens: an address, or a Unix socket."""

    host: str = "127.0.0.1"
    port: int = 8000
    unix_socket: Path | None = None

    def bind(self) -> socket.socket:
        """A socket that nobody can connect to yet. Raises `OptionError`."""
        if self.unix_socket is not None:
            return bind_unix(self.unix_socket)
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # With its protocol named asyncio sends each event at once, and does not wait for the one before to be acknowledged.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            raise_if_foreign(error)
            bound.close()
            reason = getattr(error, "strerror", None) or error
            raise OptionError(
                f"--host {self.host} --port {self.port}: {reason}; choose another one"
            ) from None
        return bound

    def address_of(self, bound: socket.socket) -> str:
        """As a user writes it."""
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        host, port = bound.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def bind_unix(path: Path) -> socket.socket:
    """A socket at `path`, in place of one that a server left there which ended. Raises `OptionError`."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.stat().st_mode) and bound.connect_ex(str(path)):
                path.unlink()
            bound.close()
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(str(path))
    except OSError as error:
        raise_if_foreign(error)
        bound.close()
        raise OptionError(f"--unix-socket {path}: {error.strerror or error}; choose another path") from None
    return bound


class _Server(uvicorn.Server):
    """Whose signals are ours: the first one drains, with the server listening on."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(load: Load, sessions: int, place: Place, options: Callable[[str], ApiOptions], drain: float) -> None:
    """Serve until a signal. `options(model)`: of the API, once the model is known. Raises `VlmexportError`."""
    bound = place.bind()
    try:
        asyncio.run(_serve(load, sessions, place, bound, options, drain))
    finally:
        bound.close()
        if place.unix_socket is not None:
            place.unix_socket.unlink(missing_ok=True)


async def _serve(
    load: Load,
    sessions: int,
    place: Place,
    bound: socket.socket,
    options: Callable[[str], ApiOptions],
    drain: float,
) -> None:
    processes = DecodingProcesses(load, sessions)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        if (info := await _until(signals, processes.start())) is None:
            return
        if info.note is not None:
            log.info(info.note)
        api = Api(processes, info, options(info.model))
        config = uvicorn.Config(
            api.app(), log_config=None, access_log=False, lifespan="off", server_header=False, ws="none",
            timeout_graceful_shutdown=5,
        )  # fmt: skip
        server = _Server(config)
        serving = loop.create_task(server.serve(sockets=[bound]))
        while not (server.started or serving.done()):
            await asyncio.sleep(POLL)
        log.info("%s is served at %s", api.served_name, place.address_of(bound))
        failed = loop.create_task(processes.failed.wait())
        asked = loop.create_task(signals.get())
        await asyncio.wait({serving, failed, asked}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            log.info("draining: %d requests may end within %g s", processes.in_flight, drain)
            api.draining = True
            await _until(signals, _drained(processes, drain))
        await processes.close()
        server.should_exit = True
        await serving
        if failed.done():
            raise LostProcessError("a process that decodes ended again and again; see its last lines above")
    finally:
        await processes.close()


async def _until(signals: asyncio.Queue[int], work: Coroutine[Any, Any, Outcome]) -> Outcome | None:
    """What `work` gives; None where a signal comes before."""
    loop = asyncio.get_running_loop()
    task, asked = loop.create_task(work), loop.create_task(signals.get())
    await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if task.done():
        return task.result()
    task.cancel()
    return None


async def _drained(processes: DecodingProcesses, seconds: float) -> None:
    """Until nothing is left, at most so long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while processes.in_flight and loop.time() < end:
        await asyncio.sleep(POLL)
