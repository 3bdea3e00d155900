"""How the matrices of a quantized target are stored, as its manifest says it."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .schema import Part, checked, integer, json_object, optional, string

INTEGERS = ("int8", "int4")


@dataclass(kw_only=True)
class TargetWeights(Part):
    """Integers of the target's own matrices: the type of most, inputs that share a scale at most, and the type of the head's,
    None where it is float. `method` says who rounded them: `rounding` (this build, by `choice`, the value of `--weights`)
    or the checkpoint's format. `quality` is what was measured beside the float model (`quantize`)."""

    dtype: str = checked(string(20, INTEGERS))
    block: int = checked(integer(1, 1 << 20))
    head: str | None = checked(optional(string(20, INTEGERS)), default=None)
    method: str = checked(string(40), default="rounding")
    choice: str | None = checked(optional(string(4096)), default=None)
    quality: dict[str, Any] | None = checked(optional(json_object), default=None)
    extra: dict[str, Any] = field(default_factory=dict)
