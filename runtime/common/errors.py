"""Every error that vlmexport raises on purpose. The message names the offending value and the remedy."""

from __future__ import annotations


class VlmexportError(Exception):
    """Base of all deliberate errors; the command line prints it as one line and exits with status 2."""


class BundleError(VlmexportError):
    """A bundle is missing files, was changed, or has a manifest that cannot be trusted."""


class InputError(VlmexportError):
    """A request cannot be served as given."""


class ImageError(InputError):
    """An image cannot be read, or is refused (too large, truncated, not an image)."""


class PromptError(InputError):
    """A prompt is empty where one is needed, too long, or not text."""


class PromptTooLongError(PromptError):
    """A prompt takes more positions than there are, or more characters than are read."""


class GrammarError(InputError):
    """A grammar asks an answer for characters that no token of the model writes."""


class OptionError(VlmexportError):
    """An option has a value that does not exist or does not fit the others."""


class DivergedError(OptionError):
    """The loss of a training is no number any more: its learning rate is too high."""


class LostProcessError(VlmexportError):
    """One of the processes that train together ended, or cannot be reached."""


class BusyError(VlmexportError):
    """A session serves another request just now, or a stream another thread: drop this request, or ask again later."""


class QueueFullError(BusyError):
    """As many requests wait for a scheduler as may: ask again later."""


class ClosedError(VlmexportError):
    """A scheduler accepts no more requests."""


class CapacityError(VlmexportError):
    """A pass would write beyond the key/value buffers."""


class DeviceError(VlmexportError):
    """A GPU, its driver or a library for it is missing, or refused what it was asked."""


class NumericsError(VlmexportError):
    """A graph gave NaN or infinity: a request ends rather than serve it."""


class ExportError(VlmexportError):
    """A model could not be exported."""


class UnsupportedModelError(ExportError):
    """A model type, or a feature of a model, that the exporter does not support (and never exports wrongly)."""


NO_ONNX_RUNTIME = "ONNX Runtime is not installed: pip install onnxruntime (it has no wheels for Python 3.10; use 3.11 or newer)"
"""What to do without the package of the CPU engine."""
