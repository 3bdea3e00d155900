"""Work of TensorRT that Ctrl-C ends.

Python handles signals in the main thread, and while TensorRT works there, only within its callbacks: their exceptions are
printed and dropped. Here it works in another thread, and the main thread waits for it in Python.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Work = TypeVar("Work")

TURN = 0.1
"""Seconds after which the main thread looks whether a signal has come: one that another thread was given wakes nobody."""


def interruptible(work: Callable[[threading.Event], Work]) -> Work:
    """Calls `work(stop)` in a thread of its own and returns what it returns, or raises what it raises.

    KeyboardInterrupt sets `stop`, waits until `work` has seen it, however often it is repeated, and is raised then: nothing
    of `work` goes on behind this call.
    """
    stop, over = threading.Event(), threading.Event()
    turn = threading.Lock()  # held by who was first: the thread, or an interrupt that keeps it from its work
    done: Future[Work] = Future()

    def run() -> None:
        if not turn.acquire(blocking=False):
            return
        try:
            done.set_result(work(stop))
        except BaseException as error:
            done.set_exception(error)
        finally:
            over.set()

    thread = threading.Thread(target=run, name="tensorrt")
    try:
        thread.start()
        while not over.wait(TURN):  # not `join`, which takes a thread for ended when it is interrupted
            pass
        return done.result()
    except KeyboardInterrupt:
        if not over.is_set():
            # Not logged: while TensorRT works, a handler's stream may be what `builder` collects.
            sys.stderr.write("\nStopping: TensorRT ends the step that it is at.\n")
        raise
    finally:
        stop.set()
        # An interrupt within `start` says nothing of whether the thread runs, or will.
        never = turn.acquire(blocking=False)
        while not never and not over.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                over.wait(TURN)


def check(stop: threading.Event) -> None:
    """Raises KeyboardInterrupt when `stop` is set: between steps of `work`."""
    if stop.is_set():
        raise KeyboardInterrupt


def make_monitor(trt: Any, stop: threading.Event) -> Any:
    """An `IProgressMonitor` that ends a build, which then gives no plan, once `stop` is set."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, *_: Any) -> None: ...

        def phase_finish(self, *_: Any) -> None: ...

        def step_complete(self, *_: Any) -> bool:
            return not stop.is_set()

    return Monitor()
