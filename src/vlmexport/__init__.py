"""Vision-language models for robots: exported, drafted, and decoded without changing one output token.

    from vlmexport import Session       # the same as vlmexport.runtime.Session

`vlmexport.runtime` runs bundles, `vlmexport.exporter` makes them, `vlmexport.calibration` trains drafts. Importing this
package loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime import Bundle as Bundle
    from .runtime import Result as Result
    from .runtime import Session as Session
    from .runtime import VlmexportError as VlmexportError

    __version__: str

__all__ = ["Bundle", "Result", "Session", "VlmexportError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("vlmexport")
    elif name in __all__:
        from . import runtime

        value = getattr(runtime, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
