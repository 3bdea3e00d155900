"""Who answers the records: one interface, whatever runs the target."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...runtime.common.errors import InputError, OptionError
from ..data.reading.records import Record

Found = list[tuple[int, ...]] | InputError
"""Answers to one record, or why it cannot be answered."""


@dataclass(frozen=True)
class GenerationOptions:
    """`max_new_tokens` is a limit per answer; answers of fewer than `min_answer` tokens are left out. At temperature 0 answers
    are greedy; above, `samples` answers are drawn per record, each a function of (seed, record's key, number of the answer)
    and not of its batch."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0
    min_answer: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise OptionError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if not 0 <= self.min_answer <= self.max_new_tokens:
            raise OptionError(
                f"--min-answer {self.min_answer} is not in 0..{self.max_new_tokens}, the tokens that --max-new-tokens allows"
            )
        if not 0 <= self.temperature < float("inf"):
            raise OptionError(f"--temperature {self.temperature} must be 0 or more, and finite")
        if self.samples < 1:
            raise OptionError(f"--samples must be at least 1, not {self.samples}")
        if self.samples > 1 and not self.temperature:
            raise OptionError(
                f"--samples {self.samples} needs a --temperature above 0: greedy answers are all equal"
            )

    def sampling(self) -> dict[str, Any] | None:
        """What makes sampled answers what they are; None for greedy ones."""
        chosen = {k: getattr(self, k) for k in ("temperature", "samples", "seed")}
        return chosen if self.temperature else None


def stream_seed(seed: int, key: str, number: int) -> int:
    """64 bits that seed answer `number` to the record `key`: another record, another number, another stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}/{key}".encode(), digest_size=8).digest(), "big")


class Answers(Protocol):
    """A target that answers records."""

    name: str
    engine: str
    """What runs it: engines agree but for near-ties of greedy answers, and draw differently."""

    @property
    def fingerprint(self) -> str:
        """Identity of its weights."""
        ...

    def answer(
        self, records: Sequence[Record], options: GenerationOptions
    ) -> Generator[tuple[int, Found], None, None]:
        """Per record its index and `options.samples` answers, ending in an end token unless the limit cut them, as
        soon as they are there; in any order."""
        ...

    def is_cut(self, answer: Sequence[int]) -> bool:
        """Whether an answer stops at the limit, in the middle of its text."""
        ...

    def text(self, answer: Sequence[int]) -> str:
        """An answer as text."""
        ...
