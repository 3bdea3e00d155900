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

    def sentence(self) -> str:
        """For people: "int4 in blocks of 32, head int8, by rounding; KL 0.0024, 98.4 % of best tokens as the float model's"."""
        head = "float head" if self.head is None else f"head {self.head}"
        text = f"{self.dtype} in blocks of {self.block}, {head}, by {self.method}"
        figures = self.quality or {}
        measured = [
            form.format(figures[name] * scale)
            for name, form, scale in (
                ("kl", "KL {:.2g}", 1),
                ("agreement", "{:.1f} % of best tokens as the float model's", 100),
            )
            if isinstance(figures.get(name), int | float)
        ]
        return text + ("; " + ", ".join(measured) if measured else "")
