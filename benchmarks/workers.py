"""One arm of a benchmark in a process of its own, asked over a pipe."""

from __future__ import annotations

import json
import subprocess
from typing import Any


class Worker:
    """A process that prints one JSON value when it is ready, and then one for each JSON value of a line that it reads."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._receive()
        """What it printed first."""

    def ask(self, value: Any) -> Any:
        """Its answer to `value`. Raises SystemExit where it ended instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def close(self) -> None:
        """End it, and wait until its memory is free."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker died; its message is above")
        return json.loads(line)
