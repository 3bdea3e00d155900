"""What a process that decodes and the one that started it tell each other (`worker.py`).

In a module of their own: what is defined in the one that a process runs is, to pickles, of `__main__`.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass

from ...runtime.bundle.folder import Bundle
from .answers import GenerationOptions
from .decoding import Ask

LOGGER = __name__.partition(".")[0]
"""Above all of the project's loggers."""


@dataclass(frozen=True)
class Start:
    """What `Decoding` takes, and the level of what is logged."""

    bundle: Bundle
    batch: int
    speculative: bool
    level: int


@dataclass(frozen=True)
class Wave:
    """What to answer, and the folder that its relative paths begin at (None: it is gone)."""

    asked: list[Ask]
    options: GenerationOptions
    folder: str | None


@dataclass(frozen=True)
class Failure:
    """An error that ended the worker, and its traceback as text."""

    error: BaseException
    trace: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """One that can be sent: an error that does not survive pickling becomes a RuntimeError of its text."""
        trace = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return cls(error, trace)
