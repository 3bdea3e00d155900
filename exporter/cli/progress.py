"""How far a build or a comparison is, on stderr: bars on a terminal, a line per stage elsewhere and with `-v`."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...runtime.commands.output import console, size
from ...runtime.commands.verbosity import is_quiet, is_verbose

log = logging.getLogger(__name__)

STAGES = {
    "graphs": "Tracing graphs",
    "weights": "Writing weights",
    "checks": "Checking graphs",
    "checksums": "Checksums",
    "parity": "Comparing with PyTorch",
    "plans": "Building TensorRT plans",
    "lossless": "Checking losslessness",
    "certificate": "Certifying",
}
"""Stage, as `progress(stage, done, total)` calls it → its name for people."""

IN_BYTES = ("weights", "checksums")
"""Stages that count bytes."""

Progress = Callable[..., None]
"""(stage, done, total), and where a stage names them what is worked on now: each is then a line of its own."""


def tell_loading() -> None:
    """On a terminal, that nothing is to be seen for a while: PyTorch and transformers take seconds to import."""
    if sys.stderr.isatty() and "torch" not in sys.modules:
        log.info("Loading PyTorch")


@contextlib.contextmanager
def shown(as_json: bool) -> Iterator[Progress | None]:
    """Yields the function to call with (stage, done, total[, item]); None where nothing is shown: with `-q`, and with --json
    unless `-v` asks for lines."""
    if is_quiet() or (as_json and not is_verbose()):
        yield None
    elif is_verbose() or not sys.stderr.isatty():
        yield from _lines()
    else:
        yield from _bars()


def _lines() -> Iterator[Progress]:
    """A line when a stage is first heard of, and one for each item that it names; with `-v` one with its count when the
    next stage begins, or all is over."""
    current: tuple[str, int] | None = None
    seen: set[str] = set()
    item, begin = "", 0.0

    def end() -> None:
        if current is not None:
            stage, done = current
            log.debug("%s: %s done", STAGES.get(stage, stage), size(done) if stage in IN_BYTES else done)

    def line(stage: str, done: int, total: int, next_item: str = "") -> None:
        nonlocal current, item, begin
        if current is None or stage != current[0]:
            end()
            if stage not in seen:
                log.info(STAGES.get(stage, stage))
            seen.add(stage)
        current = stage, done
        if item or next_item:
            now = time.monotonic()
            if item:
                log.info("graph %d/%d %s, %.0f s", done, total, item, now - begin)
            item, begin = next_item, now

    yield line
    end()


def _bars() -> Iterator[Progress]:
    """A bar per stage."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<24}"),
        BarColumn(),
        TextColumn("{task.fields[count]:>12}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, item: str = "") -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES.get(stage, stage), total=total or None, count="")
            count = size(done) if stage in IN_BYTES else f"{done}/{total}" if total else str(done)
            bars.update(tasks[stage], completed=done, total=total or None, count=f"{count} {item}".rstrip())

        yield show
        for task in bars.tasks:  # stages without a known end are over now
            if task.total is None:
                bars.update(task.id, total=task.completed)
