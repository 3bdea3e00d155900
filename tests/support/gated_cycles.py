"""Cycles that wait for the test that runs them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from vlmexport.runtime.speculative.cycle import Cycle

WAIT = 120.0
"""Seconds after which a test that hangs fails."""


class Gate:
    """Lets cycles pass one by one, or all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits, self._open = threading.Semaphore(0), False
        self.reached = threading.Semaphore(0)
        run = Cycle.run

        def gated(cycle: Cycle) -> Any:
            self.reached.release()
            if not self._open:
                assert self._permits.acquire(timeout=WAIT)
            return run(cycle)

        monkeypatch.setattr(Cycle, "run", gated)

    def wait(self) -> None:
        """Until the next cycle is about to run."""
        assert self.reached.acquire(timeout=WAIT)

    def cycle(self) -> None:
        """One runs, and the next one is about to."""
        self._permits.release()
        self.wait()

    def open(self) -> None:
        self._open = True
        self._permits.release(1000)

    def shut(self) -> None:
        """Cycles wait again."""
        self._open, self._permits = False, threading.Semaphore(0)
