"""`-v` and `-q`: how much a command says on stderr. What it says goes through Python's `logging`.

Loggers are named after their modules (`vlmexport.runtime.engines.onnxruntime`). INFO is what a command says when nobody
asks, DEBUG what `-v` adds; `-q` leaves errors. Everywhere else code only logs: the one handler of the project is added
here, for the time of a command, so that a program that uses `vlmexport` as a library decides for itself.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from ..common.errors import OptionError

LOGGER = logging.getLogger(__name__.partition(".")[0])
"""The logger above all of the project's."""

Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", help="Say more on stderr: stages and their times, what was chosen.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing on stderr but errors.")]


class _Stderr(logging.Handler):
    """A line per record on what was `sys.stderr` at first; with `-v` after the seconds since the command began."""

    def __init__(self) -> None:
        super().__init__()
        self._begin, self._stream = time.monotonic(), sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        try:
            seconds = f"{time.monotonic() - self._begin:8.2f} s  " if is_verbose() else ""
            self._stream.write(f"{seconds}{printable(record.getMessage())}\n")
            self._stream.flush()
        except Exception:  # as every handler of the standard library
            self.handleError(record)


def printable(text: str) -> str:
    """`text` in one line. A file of someone else's may put anything into a message: terminals obey control characters."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in line)


def is_verbose() -> bool:
    """Whether `-v` was given."""
    return LOGGER.isEnabledFor(logging.DEBUG)


def is_quiet() -> bool:
    """Whether `-q` was given."""
    return not LOGGER.isEnabledFor(logging.INFO)


@contextlib.contextmanager
def saying() -> Iterator[None]:
    """What the project logs within the block goes to stderr, from INFO on, until `choose` says otherwise."""
    handler, level, propagate = _Stderr(), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # libraries add handlers above it, which would say everything again
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


def choose(verbose: bool, quiet: bool) -> None:
    """Obey the two options. Raises `OptionError` where both were given, before or behind the command."""
    if (verbose and (quiet or is_quiet())) or (quiet and is_verbose()):
        raise OptionError("-v and -q: a command says more or less; give one of them")
    if verbose or quiet:
        LOGGER.setLevel(logging.DEBUG if verbose else logging.ERROR)


def with_verbosity(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command for typer that has the two options besides its own.

    With `-q` nothing that is printed on `sys.stderr` meanwhile is shown; errors are raised and shown behind it.
    """
    signature = inspect.signature(command, eval_str=True)

    def run(*, verbose: bool, quiet: bool, **values: Any) -> Any:
        choose(verbose, quiet)
        with _prints_dropped() if is_quiet() else contextlib.nullcontext():
            return command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [parameter.replace(kind=keyword) for parameter in signature.parameters.values()]
    more = [
        inspect.Parameter(name, keyword, default=False, annotation=kind)
        for name, kind in (("verbose", Verbose), ("quiet", Quiet))
    ]
    run.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
    run.__doc__, run.__name__ = command.__doc__, getattr(command, "__name__", "command")
    run.command = command  # type: ignore[attr-defined]
    return run


@contextlib.contextmanager
def _prints_dropped() -> Iterator[None]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):  # noqa: PTH123
        yield
