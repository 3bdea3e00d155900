"""A bar on stderr for commands that measure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def showing(as_json: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while it measures: a line per step with `-v`, none with `-q` and --json."""
    from .output import console
    from .verbosity import is_quiet, is_verbose

    if as_json or is_quiet() or is_verbose():
        yield lambda what, done, total: log.debug("%s: %d of %d", what, done, total)
        return
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
