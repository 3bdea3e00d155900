"""What a request returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..sampling.logprobs import TokenLogprob
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
    parse: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)
    """Of a request with a grammar: makes the value of a whole answer."""

    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    """Of a request that asked for them: one entry for each of `tokens`."""

    @classmethod
    def unbegun(cls, finish_reason: str) -> Result:
        """Of a request that ended before it had a place."""
        return cls("", [], finish_reason, Stats())

    @property
    def parsed(self) -> Any:
        """The value of an answer with a `schema`: what its JSON stands for, or an instance of the class of pydantic's that was
        given; with another grammar the text. None without a grammar, and of an answer that was cut short: only the finish
        reason eos makes it whole. Raises what validators of that class raise."""
        return self.parse(self.text) if self.parse is not None and self.finish_reason == "eos" else None

    @property
    def lossy(self) -> str | None:
        """ "typical" where drafts were accepted that way: the text is then not distributed as the model's. "similar" where a
        picture stands for another. "similar, typical" for both. Else None."""
        return self.stats.lossy

    def to_dict(self) -> dict[str, Any]:
        """JSON object."""
        parsed = self.parsed
        dump = getattr(parsed, "model_dump", None)
        return {
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "lossy": self.lossy,
            **({} if self.logprobs is None else {"logprobs": [each._asdict() for each in self.logprobs]}),
            **({} if self.parse is None else {"parsed": dump(mode="json") if dump else parsed}),
            "stats": self.stats.to_dict(),
        }
