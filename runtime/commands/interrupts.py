"""Ctrl-C and SIGTERM of a command line."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOPPING: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Signals that end a command with its cleaning up, and how Python treats them before anybody else decided."""


@contextlib.contextmanager
def interrupts() -> Iterator[list[int]]:
    """Turns Ctrl-C and SIGTERM into KeyboardInterrupt, and collects them: a library that is interrupted while it is
    imported may raise an error of its own instead.

    An interrupt that hits a callback (of a weak reference, say) is dropped by Python: it is then sent again.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    ours = [number for number, usual in STOPPING.items() if signal.getsignal(number) is usual]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def unraisable(dropped: Any) -> None:
        if seen and dropped.exc_type is not None and issubclass(dropped.exc_type, KeyboardInterrupt):
            # Not at once: it would hit this hook, whose errors are dropped as well.
            again = threading.Timer(0.01, _thread.interrupt_main, seen[-1:])
            again.daemon = True
            again.start()
        else:
            hook(dropped)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield seen
    finally:
        for number in ours:
            signal.signal(number, STOPPING[number])
        sys.unraisablehook = hook
