"""What a request returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..speedup.stats import Stats


@dataclass(frozen=True)
class Result:
    """`tokens` holds every emitted id, the end token and those of a stop string included; `text` is their text without
    special tokens, cut before a stop string, also before one that is or holds a special token. `finish_reason`: eos,
    length, stop, deadline or cancelled."""

    text: str
    tokens: list[int]
    finish_reason: str
    stats: Stats

    @property
    def lossy(self) -> str | None:
        """ "typical" where drafts were accepted that way: the text is then not distributed as the model's. Else None."""
        return self.stats.lossy

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "lossy": self.lossy,
            "stats": self.stats.to_dict(),
        }
