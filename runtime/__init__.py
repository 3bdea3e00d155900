"""Run a deployment bundle: speculative decoding without torch.

    from vlmexport.runtime import Session

    with Session.load("bundle") as session:
        print(session.generate(image="scene.png").text)

Names are imported when first used: `import vlmexport.runtime` alone loads neither numpy nor an engine.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bundle.folder import Bundle as Bundle
    from .bundle.manifest import Manifest as Manifest
    from .common.errors import BundleError as BundleError
    from .common.errors import BusyError as BusyError
    from .common.errors import CapacityError as CapacityError
    from .common.errors import ClosedError as ClosedError
    from .common.errors import DeviceError as DeviceError
    from .common.errors import DivergedError as DivergedError
    from .common.errors import ExportError as ExportError
    from .common.errors import ImageError as ImageError
    from .common.errors import InputError as InputError
    from .common.errors import LostProcessError as LostProcessError
    from .common.errors import NumericsError as NumericsError
    from .common.errors import OptionError as OptionError
    from .common.errors import PromptError as PromptError
    from .common.errors import PromptTooLongError as PromptTooLongError
    from .common.errors import QueueFullError as QueueFullError
    from .common.errors import UnsupportedModelError as UnsupportedModelError
    from .common.errors import VlmexportError as VlmexportError
    from .drafts.memory.answers import Memory as Memory
    from .images.video import Video as Video
    from .policy.adaptive import Adaptive as Adaptive
    from .policy.base import FixedLength as FixedLength
    from .sampling.logprobs import Logprobs as Logprobs
    from .sampling.typical import Typical as Typical
    from .serving.scheduler import Scheduler as Scheduler
    from .serving.ticket import Ticket as Ticket
    from .session.options import GenerateOptions as GenerateOptions
    from .session.result import Result as Result
    from .session.session import Session as Session
    from .speedup.stats import Stats as Stats

# ONNX Runtime reads it when it is loaded; without it, it keeps a device id and a database of events under the home
# folder, and reports. Everything of vlmexport that loads it imports this package first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "Bundle": "bundle.folder",
    "Manifest": "bundle.manifest",
    "Adaptive": "policy.adaptive",
    "FixedLength": "policy.base",
    "GenerateOptions": "session.options",
    "Logprobs": "sampling.logprobs",
    "Memory": "drafts.memory.answers",
    "Result": "session.result",
    "Scheduler": "serving.scheduler",
    "Session": "session.session",
    "Stats": "speedup.stats",
    "Ticket": "serving.ticket",
    "Typical": "sampling.typical",
    "Video": "images.video",
    **dict.fromkeys(
        (
            "BundleError",
            "BusyError",
            "CapacityError",
            "ClosedError",
            "DeviceError",
            "DivergedError",
            "ExportError",
            "GrammarError",
            "ImageError",
            "InputError",
            "LostProcessError",
            "NumericsError",
            "OptionError",
            "PromptError",
            "PromptTooLongError",
            "QueueFullError",
            "UnsupportedModelError",
            "VlmexportError",
        ),
        "common.errors",
    ),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "LogisticLength":  # for one release
        import warnings

        from .policy.logistic import LogisticLength

        text = "LogisticLength is deprecated and leaves with the next release: any fixed length that suits the draft is faster"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return LogisticLength
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
