"""One hostile input: run in a process of its own, within limits, and judged.

The process is a fork of one that has everything imported, so that a case takes milliseconds.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.support.forks import leave

HANG = 20.0
"""Seconds after which a case counts as a hang. Those that it waits for a processor, which others have, do not count."""

MEMORY = 2 << 30
"""Bytes that a case may take at its peak, beside those of the process that it is a fork of."""


@dataclass(frozen=True)
class Case:
    """`serve()` does what a user would do and returns an exit status: a command's. It prints where a command prints."""

    serve: Callable[[], int]
    check: Callable[[int, str], str | None] = lambda status, output: None
    """`check(status, stdout)`: what is wrong with an answer, if anything."""
    one_line: bool = True
    """A refusal is one line."""
    limit: float = HANG
    """Seconds."""


@dataclass(frozen=True)
class Verdict:
    """How a case ended. `problem` is None when all was well."""

    problem: str | None
    status: int
    seconds: float
    peak: int
    """Bytes, beside those of the process that it was a fork of."""
    errors: str


def judge(case: Case, folder: Path) -> Verdict:
    """Run a case in a fork; its output goes to files in `folder`."""
    out, err = folder / "stdout", folder / "stderr"
    begin, held = time.monotonic(), anonymous()
    child = os.fork()
    if child == 0:
        _serve(case, out, err)
    status, usage, hung = _wait(child, begin + case.limit)
    seconds, peak = time.monotonic() - begin, max(0, (usage.ru_maxrss << 10) - held)
    answer, errors = out.read_text("utf-8", "replace"), err.read_text("utf-8", "replace")
    problem = None
    if hung:
        problem = f"hangs for more than {case.limit:.0f} s"
    elif os.WIFSIGNALED(status):
        problem = f"ends by signal {signal.Signals(os.WTERMSIG(status)).name}"
    elif "Traceback (most recent call last)" in errors:
        problem = "a traceback"
    elif peak > MEMORY:
        problem = f"takes {peak / 1e9:.1f} GB"
    else:
        code = os.WEXITSTATUS(status)
        if code not in (0, 1, 2):
            problem = f"exit status {code}"
        elif code == 2 and case.one_line and len(errors.strip().splitlines()) != 1:
            problem = f"{len(errors.strip().splitlines())} lines of errors"
        else:
            problem = case.check(code, answer)
    return Verdict(problem, status, seconds, peak, errors)


def _wait(child: int, deadline: float) -> tuple[int, resource.struct_rusage, bool]:
    pause = 0.0005
    while True:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return status, usage, False
        if time.monotonic() > deadline and time.monotonic() > deadline + denied(child):
            os.kill(child, signal.SIGABRT)  # the fault handler says where it was
            time.sleep(0.5)
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return status, usage, True
        time.sleep(pause)
        pause = min(0.02, pause * 1.5)


def anonymous() -> int:
    """Bytes of this process that are in no file, which a fork begins with (files' pages come when it touches them); 0
    where the system does not say (only Linux does)."""
    try:
        lines = Path("/proc/self/status").read_text("ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))
    except (OSError, ValueError, StopIteration):
        return 0


def denied(process: int) -> float:
    """Seconds that a process was ready to run and another ran; 0 where the system does not say (only Linux does)."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _serve(case: Case, out: Path, err: Path) -> NoReturn:
    """The child: never returns."""

    def served() -> int:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the campaign's are not a command's
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        faulthandler.enable()
        return case.serve()

    leave(served)
