"""Which methods of quantization are read, by `quant_method`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ....runtime.common.errors import UnsupportedModelError
from .auto_round import read_auto_round
from .awq import read_awq
from .compressed_tensors import read_compressed_tensors
from .float8 import read_fp8
from .gptq import read_gptq
from .layout import Layout
from .settings import REMEDY, Settings

LAYOUTS: dict[str, Callable[[Settings], Layout]] = {
    "auto-round": read_auto_round,
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gptq": read_gptq,
}
ALIASES = {
    "intel/auto-round": "auto-round",
    "auto_round": "auto-round",
    "compressed_tensors": "compressed-tensors",
}
"""Names that some releases wrote."""

KEYS = ("quantization_config", "compression_config")


def find_layout(parts: Iterable[Any], where: str) -> Layout | None:
    """The layout that one of the configurations `parts` describes, of the whole model or a part of it; None where none does.

    Raises UnsupportedModelError for a method, or a kind of it, that is not read, for values that are damaged, and for
    several descriptions that differ.
    """
    described = [value for part in parts for key in KEYS if (value := getattr(part, key, None))]
    if not described:
        return None
    values = described[0]
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"{where}: quantized by {values!r:.80}, which is no object; {REMEDY}")
    method = values.get("quant_method") or values.get("quant_algo")
    if any(other != values for other in described[1:]):
        raise UnsupportedModelError(
            f"{where}: quantized by {method!r:.80} and, in another part, otherwise; {REMEDY}"
        )
    name = method.lower() if isinstance(method, str) else ""
    name = ALIASES.get(name, name)
    if name not in LAYOUTS:
        settings = Settings(values, where, method)
        raise settings.refuse(f"this method is not read, only {', '.join(LAYOUTS)}")
    return LAYOUTS[name](Settings(values, where, name))


def without_layout(parts: Iterable[Any]) -> None:
    """Takes the descriptions out of the configurations, so that transformers makes the model's own class of each."""
    for part in parts:
        for key in KEYS:
            if hasattr(part, key):
                delattr(part, key)
