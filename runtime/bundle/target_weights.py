"""How the matrices of a quantized target are stored, as its manifest says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .schema import Part, checked, integer, optional, string


@dataclass(kw_only=True)
class TargetWeights(Part):
    """Integers of the target's own matrices: their type, inputs per scale, the type of the head's where it has another, and
    how they were rounded."""

    dtype: str = checked(string(20, ("int8", "int4")))
    block: int = checked(integer(1, 1 << 20))
    head: str | None = checked(optional(string(20)), default=None)
    method: str = checked(string(40), default="rounding")
    extra: dict[str, Any] = field(default_factory=dict)
