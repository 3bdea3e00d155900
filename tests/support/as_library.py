"""Functions of tests that stand for a library's: what they raise is the library's (`runtime/common/foreign_errors.py`)."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def as_library(name: str) -> Callable[[Callable[..., Any]], Any]:
    """The same function, as one of the module `name`. It knows what its own module holds by now."""

    def changed(function: Any) -> Any:
        space = {**function.__globals__, "__name__": name}
        return types.FunctionType(
            function.__code__, space, function.__name__, function.__defaults__, function.__closure__
        )

    return changed
