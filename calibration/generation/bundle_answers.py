"""Answers of the target by the runtime: its bundle, many requests decoded together, on every core."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...exporter.common.memory import available_memory
from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.common.cpu_count import cores
from ...runtime.common.errors import InputError, NumericsError, OptionError
from ...runtime.engines.onnxruntime import SINGLE_THREAD_BYTES
from ...runtime.measure.inspection import cross_kv_bytes_per_row, kv_bytes_per_sequence
from ..data.reading.records import Record
from .answers import Found, GenerationOptions
from .decoding import Decoding, Outcome
from .messages import LOGGER, Start
from .ray_workers import RayWorkers
from .workers import Workers

BATCH_PER_CORE, BATCH = 32, 64
"""Requests decoded together: of a small model on each core, of a larger one on all of them (more gain little)."""

MEMORY_SHARE = 0.5
"""Of the memory that is available, for key/value caches."""


class BundleAnswers:
    """`Answers` by a bundle. A small model runs once per core, each in a process of its own (`Workers`): its matrices
    are too small to share the work on one of them, and its passes so short that threads would wait for each other's
    Python. It answers in waves: every sequence of a batch attends over as many cache entries as the longest has, and that costs
    a small model more than the places which a wave leaves empty at its end. Unless memory is short, waves are the same
    on any number of cores, and so are their answers. One alone is decoded in this process: others would take about as
    long to start as they save. Without a draft of its own a small model decodes plainly: looking up what comes next
    costs more than a row.

    Args:
        bundle: of the target. name: of the target.
        batch_size: most requests that a session decodes together; by default what suits the memory.
        threads: cores to use, by default all.
        ray: address of a Ray cluster whose actors take the place of processes (`RayWorkers`), also of larger models.

    Raises:
        BundleError: the bundle cannot be read. OptionError: `batch_size` is above the bundle's limit; no cluster answers.
    """

    engine = "runtime"

    def __init__(
        self,
        bundle: Bundle | Path,
        name: str | None = None,
        batch_size: int | None = None,
        threads: int | None = None,
        ray: str | None = None,
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        manifest = self.bundle.manifest
        self.name = name or manifest.model.source
        small = manifest.weights.total < SINGLE_THREAD_BYTES
        count = (threads or cores()) if small else 1
        most = manifest.limits.max_batch
        if batch_size is not None and batch_size > most:
            raise OptionError(
                f"--batch-size {batch_size} is above {most}, the max_batch that {self.bundle.path} was built with"
            )
        batch = batch_size or min(most, _fitting(manifest, BATCH_PER_CORE if small else BATCH, count))
        speculative = not small or bool(manifest.drafts)
        self._small = small
        self.sessions = count, batch
        """How many there are at most, and how many requests each decodes together."""
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        start = Start(self.bundle.unread(), batch, speculative, level)
        self._is_spread = ray is not None
        self._workers = Workers(count, start) if ray is None else RayWorkers(ray, start, not small)
        self._load = partial(Decoding, self.bundle, batch, None if small else threads, speculative)
        self._own = self._load() if count == 1 and ray is None else None
        self._ends = frozenset(manifest.text.eos_token_ids)

    @property
    def fingerprint(self) -> str:
        """See `Answers`."""
        return self.bundle.manifest.model.fingerprint

    def answer(
        self, records: Sequence[Record], options: GenerationOptions
    ) -> Generator[tuple[int, Found], None, None]:
        """See `Answers`. Closing the iterator ends the requests that are running.

        Raises:
            BundleError: the bundle cannot be loaded. NumericsError: of the target. VlmexportError: a process that
            decodes was ended, or cannot be started; another call is not over.
        """
        asked = [(record, number) for record in records for number in range(options.samples)]
        count, batch = self.sessions
        waves = _waves(len(asked), batch) if self._small or self._is_spread else [range(len(asked))]
        decoder = self._workers if self._is_spread or min(count, len(waves)) > 1 else self._decoding()
        with closing(decoder.waves(asked, waves, options)) as outcomes:
            yield from _gathered(outcomes, options.samples)

    def _decoding(self) -> Decoding:
        """The session of this process."""
        if self._own is None:
            self._own = self._load()
        return self._own

    def is_cut(self, answer: Sequence[int]) -> bool:
        """See `Answers`."""
        return not answer or answer[-1] not in self._ends

    def text(self, answer: Sequence[int]) -> str:
        """See `Answers`."""
        return self.bundle.tokenizer.decode(answer)

    def close(self) -> None:
        """Free weights and buffers, and end processes."""
        self._workers.close()
        if self._own is not None:
            self._own.close()


def _waves(places: int, size: int) -> list[range]:
    """`places` in waves of `size`, the last of what is left."""
    return [range(begin, min(begin + size, places)) for begin in range(0, places, size)]


def _gathered(
    outcomes: Iterable[tuple[int, Outcome]], samples: int
) -> Generator[tuple[int, Found], None, None]:
    """All answers to a record together, or the first reason why there are none."""
    pending: dict[int, dict[int, tuple[int, ...]]] = {}
    failed: set[int] = set()
    for place, outcome in outcomes:
        record, number = divmod(place, samples)
        if isinstance(outcome, NumericsError):
            raise outcome  # the target's own: no other answer of it is worth more
        if isinstance(outcome, InputError):
            if record not in failed:
                failed.add(record)
                yield record, outcome
            continue
        answers = pending.setdefault(record, {})
        answers[number] = outcome
        if len(answers) == samples:
            del pending[record]
            yield record, [answers[i] for i in range(samples)]


def _fitting(manifest: Manifest, batch: int, sessions: int) -> int:
    """At most `batch`, so that the caches of all sessions take no more than their share of the memory."""
    limits, held = manifest.limits, replace(manifest, cache_dtype="float32")  # a CPU's
    each = kv_bytes_per_sequence(held)
    each += cross_kv_bytes_per_row(held) * (limits.max_source or limits.max_length)
    available = available_memory()
    return batch if available is None else max(1, min(batch, int(MEMORY_SHARE * available / sessions / each)))
