"""Answers of the target in PyTorch: where a GPU runs it, or where a command holds it anyway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ...runtime.common.errors import InputError
from ..data.reading.records import Record
from ..targets.batches import Batches
from ..targets.target import Target
from .answers import Found, GenerationOptions, stream_seed

BATCH = 128
"""Records per call of the model's `generate`."""


class TorchAnswers:
    """`Answers` by the model's own `generate`, `batch_size` records at a time, fewer where a GPU's memory runs out, which
    `report` is told."""

    engine = "torch"

    def __init__(
        self,
        target: Target,
        batch_size: int | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.target, self.name = target, target.name
        self._batches = Batches(batch_size or BATCH, report)
        self._ends: Collection[int] = set(target.eos_token_ids)

    @property
    def fingerprint(self) -> str:
        """See `Answers`."""
        return self.target.fingerprint

    def answer(
        self, records: Sequence[Record], options: GenerationOptions
    ) -> Generator[tuple[int, Found], None, None]:
        """See `Answers`."""
        for places, outcomes in self._batches.over(records, lambda some: self._found(some, options)):
            yield from zip(places, outcomes, strict=True)

    def is_cut(self, answer: Sequence[int]) -> bool:
        """See `Answers`."""
        return not answer or answer[-1] not in self._ends

    def text(self, answer: Sequence[int]) -> str:
        """See `Answers`."""
        return self.target.tokenizer.decode(answer, skip_special_tokens=True)

    def _found(self, records: Sequence[Record], options: GenerationOptions) -> list[Found]:
        """What is found for each of the records."""
        try:
            return list(self._batch(records, options))
        except InputError:  # one of them cannot be read; which one?
            bad = {i: error for i, one in enumerate(records) if (error := self._problem(one)) is not None}
            if not bad:
                raise
        good = [one for i, one in enumerate(records) if i not in bad]
        outcomes = iter(self._batch(good, options) if good else [])
        return [bad[i] if i in bad else next(outcomes) for i in range(len(records))]

    def _batch(self, records: Sequence[Record], options: GenerationOptions) -> list[list[tuple[int, ...]]]:
        if not options.temperature:
            return [[a] for a in self.target.generate(records, options.max_new_tokens)]
        by_sample = []
        for sample in range(options.samples):
            seeds = [stream_seed(options.seed, r.key, sample) for r in records]
            draws = partial(_draws, seeds, options.temperature)
            by_sample.append(self.target.generate(records, options.max_new_tokens, draws))
        return [list(answers) for answers in zip(*by_sample, strict=True)]

    def _problem(self, record: Record) -> InputError | None:
        try:
            self.target.prompt(record)
        except InputError as error:
            return error
        return None


def _draws(seeds: Sequence[int], temperature: float, batch_indices: Sequence[int]) -> LogitsProcessorList:
    return LogitsProcessorList([Draws([seeds[batch_index] for batch_index in batch_indices], temperature)])


class Draws(LogitsProcessor):
    """Makes the largest logit a draw: argmax(logits / T + Gumbel noise) is distributed as softmax(logits / T).

    Each row has a random stream of its own, so that its draws do not depend on the rows beside it.

    Args:
        seeds: of the streams, one per row. temperature: T > 0.
    """

    def __init__(self, seeds: Sequence[int], temperature: float) -> None:
        self._streams = [np.random.default_rng(seed) for seed in seeds]
        self._temperature = temperature

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        noise = np.stack([stream.gumbel(size=scores.shape[-1]) for stream in self._streams])
        return scores.double() / self._temperature + torch.from_numpy(noise).to(scores.device)  # type: ignore[return-value]
