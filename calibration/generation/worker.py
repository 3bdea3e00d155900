"""A process that decodes for another one: `python -m vlmexport.calibration.generation.worker`.

`workers.py` starts it. Its standard input is a socket that carries pickles both ways: in come a `Start` and then
`Wave`s, out go (place in the wave, `Outcome`) as soon as they are there, None at the end of a wave, a `Failure`, and
what is logged. It ends as soon as the socket does, whatever it is doing: nobody else would end it when its parent is
killed. It needs neither torch nor transformers.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import threading
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any

from .decoding import Decoding
from .messages import LOGGER, Failure, Start, Wave


class _Sender(QueueHandler):
    """Sends what is logged to the parent, which decides what becomes of it."""

    def enqueue(self, record: logging.LogRecord) -> None:
        _send(self.queue, record)  # type: ignore[arg-type]


def main() -> None:
    """Answer until the socket ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever sends it ends this process, with no traceback
    connection: Connection = Connection(0)
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, arrived), daemon=True).start()
    try:
        _serve(connection, arrived)
    except Exception as error:  # the parent raises it
        _send(connection, Failure.of(error))


def _serve(connection: Connection, arrived: queue.SimpleQueue[Any]) -> None:
    start: Start = _next(arrived)
    logger = logging.getLogger(LOGGER)
    logger.addHandler(_Sender(connection))  # type: ignore[arg-type]
    logger.setLevel(start.level)
    decoding = Decoding(start.bundle, start.batch, None, start.speculative)
    while True:
        wave: Wave = _next(arrived)
        if wave.folder is not None:
            os.chdir(wave.folder)
        for outcome in decoding.wave(wave.asked, wave.options):
            _send(connection, outcome)
        _send(connection, None)


def _send(connection: Connection, message: Any) -> None:
    try:
        connection.send(message)
    except OSError:
        os._exit(0)  # as `_read`


def _next(arrived: queue.SimpleQueue[Any]) -> Any:
    message = arrived.get()
    if isinstance(message, Exception):
        raise message
    return message


def _read(connection: Connection, arrived: queue.SimpleQueue[Any]) -> None:
    """Hand on what arrives, so that the end is seen while the main thread decodes."""
    while True:
        try:
            arrived.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # there is nobody left to answer, and nothing to save
        except Exception as error:  # a pickle that cannot be read here
            arrived.put(error)


if __name__ == "__main__":
    main()
