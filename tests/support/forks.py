"""A function in a fork of this process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

RAISED = 70
"""Exit status of a fork whose function raised."""


def forked(serve: Callable[[], int]) -> int:
    """The id of a fork that ends with the exit status which `serve` gives; `RAISED`, behind a traceback, where it raises."""
    sys.stdout.flush()  # else the fork would write it once more
    sys.stderr.flush()
    child = os.fork()
    return child or leave(serve)


def leave(serve: Callable[[], int]) -> NoReturn:
    """For a fork: ends this process as `forked` says."""
    code = RAISED
    try:
        code = serve()
    except BaseException:  # what a command would show as a traceback
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
