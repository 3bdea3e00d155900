"""Who answers the records: one interface, whatever runs the target."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ...runtime.errors import OptionError
from ..data.records import Record
from ..targets.target import Target


@dataclass(frozen=True)
class GenerationOptions:
    """`max_new_tokens` is a limit per answer. At temperature 0 answers are greedy; above, `samples` answers are drawn
    per record, each a function of (seed, record's key, number of the answer) and not of its batch."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise OptionError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
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
        chosen = {k: v for k, v in asdict(self).items() if k != "max_new_tokens"}
        return chosen if self.temperature else None


class Answers(Protocol):
    """A target that answers records."""

    name: str

    @property
    def fingerprint(self) -> str:
        """Identity of its weights."""
        ...

    def answer(self, records: Sequence[Record], options: GenerationOptions) -> list[list[tuple[int, ...]]]:
        """`options.samples` answers per record, ending in an end token unless the limit cut them."""
        ...

    def is_cut(self, answer: Sequence[int]) -> bool:
        """Whether an answer stops at the limit, in the middle of its text."""
        ...

    def text(self, answer: Sequence[int]) -> str:
        """An answer as text."""
        ...


class TorchAnswers:
    """The target in PyTorch."""

    def __init__(self, target: Target) -> None:
        self.target, self.name = target, target.name
        self._ends: Collection[int] = set(target.eos_token_ids)

    @property
    def fingerprint(self) -> str:
        """See `Answers`."""
        return self.target.fingerprint

    def answer(self, records: Sequence[Record], options: GenerationOptions) -> list[list[tuple[int, ...]]]:
        """See `Answers`."""
        if not options.temperature:
            return [[a] for a in self.target.generate(records, options.max_new_tokens)]
        by_sample = []
        for sample in range(options.samples):
            keys = [[options.seed, zlib.crc32(r.key.encode()), sample] for r in records]
            draws = partial(_draws, keys, options.temperature)
            by_sample.append(self.target.generate(records, options.max_new_tokens, draws))
        return [list(answers) for answers in zip(*by_sample, strict=True)]

    def is_cut(self, answer: Sequence[int]) -> bool:
        """See `Answers`."""
        return not answer or answer[-1] not in self._ends

    def text(self, answer: Sequence[int]) -> str:
        """See `Answers`."""
        return self.target.tokenizer.decode(answer, skip_special_tokens=True)


def _draws(keys: Sequence[Sequence[int]], temperature: float, rows: Sequence[int]) -> LogitsProcessorList:
    return LogitsProcessorList([Draws([keys[row] for row in rows], temperature)])


class Draws(LogitsProcessor):
    """Makes the largest logit a draw: argmax(logits / T + Gumbel noise) is distributed as softmax(logits / T).

    Each row has a random stream of its own, so that its draws do not depend on the rows beside it.

    Args:
        keys: of the streams, one per row, lists of non-negative integers. temperature: T > 0.
    """

    def __init__(self, keys: Sequence[Sequence[int]], temperature: float) -> None:
        self._streams = [np.random.default_rng(list(key)) for key in keys]
        self._temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        noise = np.stack([stream.gumbel(size=scores.shape[-1]) for stream in self._streams])
        return scores.double() / self._temperature + torch.from_numpy(noise).to(scores.device)  # type: ignore[return-value]
