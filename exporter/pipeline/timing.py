"""How long every stage of a build took."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)


class Stages:
    """Seconds by stage, in the order in which they ended. `with stages("graphs"):` measures one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        log.debug("stage %s: %.1f s", name, time.monotonic() - start)
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - start, 2)

    @property
    def total(self) -> float:
        """Seconds since the object was made."""
        return round(time.monotonic() - self._start, 2)


def stage_line(seconds: dict[str, float]) -> str:
    """One line for people: `checks 0.4 s, graphs 12 s, …`."""
    return ", ".join(f"{name} {value:.0f} s" if value >= 10 else f"{name} {value:.1f} s"
                     for name, value in seconds.items())  # fmt: skip
