"""Answers of the target by the runtime: its bundle, many requests decoded together, on every core."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ...exporter.memory import available_memory
from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import Manifest
from ...runtime.bundle.schema import ITEM_SIZES
from ...runtime.cores import cores
from ...runtime.engines.onnxruntime import SINGLE_THREAD_BYTES
from ...runtime.errors import InputError, NumericsError, OptionError
from ...runtime.measure.inspection import cross_kv_bytes_per_row, kv_bytes_per_sequence
from ...runtime.result import Result
from ...runtime.session import Session
from ..data.records import Record
from .answers import Found, GenerationOptions, stream_seed

BATCH_PER_CORE, BATCH = 32, 64
"""Requests decoded together: of a small model on each core, of a larger one on all of them (more gain little)."""

MEMORY_SHARE = 0.5
"""Of the memory that is available, for key/value caches."""


class BundleAnswers:
    """`Answers` by a bundle. A small model runs once per core, each on a thread of its own: its matrices are too small
    to share the work on one of them. It answers in waves: every sequence of a batch attends over as many rows as the
    longest has, and that costs a small model more than the places which a wave leaves empty at its end. Without a
    draft of its own it decodes plainly: looking up what comes next costs more than a row of it.

    Args:
        bundle: of the target. name: of the target.
        batch_size: most requests that a session decodes together; by default what suits the memory.
        threads: cores to use, by default all.

    Raises:
        BundleError: the bundle cannot be read. OptionError: `batch_size` is above the bundle's limit.
    """

    engine = "runtime"

    def __init__(
        self,
        bundle: Bundle | Path,
        name: str | None = None,
        batch_size: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        manifest = self.bundle.manifest
        self.name = name or manifest.model.source
        small = manifest.weights.bytes < SINGLE_THREAD_BYTES
        count = (threads or cores()) if small else 1
        most = manifest.limits.max_batch
        if batch_size is not None and batch_size > most:
            raise OptionError(
                f"--batch-size {batch_size} is above {most}, the max_batch that {self.bundle.path} was built with"
            )
        self._waves = small
        self._speculative = not small or bool(manifest.drafts)
        batch = batch_size or min(most, _fitting(manifest, BATCH_PER_CORE if small else BATCH, count))
        self._sessions = [
            Session.load(self.bundle, max_batch=batch, threads=None if small else threads)
            for _ in range(count)
        ]
        self._ends = frozenset(manifest.text.eos_token_ids)

    @property
    def fingerprint(self) -> str:
        """See `Answers`."""
        return self.bundle.manifest.model.fingerprint

    @property
    def sessions(self) -> tuple[int, int]:
        """How many there are, and how many requests each decodes together."""
        return len(self._sessions), self._sessions[0].max_batch

    def answer(
        self, records: Sequence[Record], options: GenerationOptions
    ) -> Generator[tuple[int, Found], None, None]:
        """See `Answers`. Closing the iterator ends the requests that are running."""
        places = _Places(len(records), options.samples)
        request = partial(_request, options=options, speculative=self._speculative)
        outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        workers = [
            threading.Thread(
                target=_work, args=(session, records, request, places, outcomes, self._waves), daemon=True
            )
            for session in self._sessions
        ]
        for worker in workers:
            worker.start()
        try:
            yield from _gathered(outcomes, len(workers), options.samples)
        finally:
            places.stop()
            for session in self._sessions:
                session.cancel()
            for worker in workers:
                worker.join()

    def is_cut(self, answer: Sequence[int]) -> bool:
        """See `Answers`."""
        return not answer or answer[-1] not in self._ends

    def text(self, answer: Sequence[int]) -> str:
        """See `Answers`."""
        return self.bundle.tokenizer.decode(answer)

    def close(self) -> None:
        """Free weights and buffers."""
        for session in self._sessions:
            session.close()


_Outcome = tuple[tuple[int, int], Result | InputError | NumericsError] | BaseException | None
"""((record, number of the answer), what came of it); what ended a worker; None when one has nothing left to do."""


class _Places:
    """(record, number of the answer), each handed out once, to whichever worker asks."""

    def __init__(self, records: int, samples: int) -> None:
        self._left = iter([(record, number) for record in range(records) for number in range(samples)])
        self._lock = threading.Lock()

    def take(self) -> tuple[int, int] | None:
        with self._lock:
            return next(self._left, None)

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._lock:
            self._left = iter(())


def _work(
    session: Session,
    records: Sequence[Record],
    request: Callable[[Record, int], Mapping[str, Any]],
    places: _Places,
    outcomes: queue.SimpleQueue[_Outcome],
    waves: bool,
) -> None:
    """Answer what `places` gives until there is nothing left; in `waves`, a batch ends before the next begins."""
    wave = session.max_batch if waves else None
    taken: list[tuple[int, int]] = []

    def requests() -> Iterator[Mapping[str, Any]]:
        for place in islice(iter(places.take, None), wave):
            taken.append(place)
            yield request(records[place[0]], place[1])

    try:
        before = -1
        while before < len(taken):
            before = len(taken)
            for number, outcome in session.generate_many(requests()):
                outcomes.put((taken[before + number], outcome))
    except BaseException as error:  # the caller's thread raises it
        outcomes.put(error)
    outcomes.put(None)


def _request(record: Record, number: int, options: GenerationOptions, speculative: bool) -> dict[str, Any]:
    """What the session is asked. It reads picture files itself, when their turn comes."""
    image = record.image
    request: dict[str, Any] = {
        "image": None if image is None else image.file or image.load(),
        "prompt": record.prompt,
        "max_new_tokens": options.max_new_tokens,
        "speculative": speculative,
    }
    if options.temperature:
        seed = stream_seed(options.seed, record.key, number)
        request |= {"temperature": options.temperature, "seed": seed}
    return request


def _gathered(
    outcomes: queue.SimpleQueue[_Outcome], workers: int, samples: int
) -> Iterator[tuple[int, Found]]:
    """All answers to a record together, or the first reason why there are none."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    failed: set[int] = set()
    while workers:
        outcome = outcomes.get()
        if outcome is None:
            workers -= 1
            continue
        if isinstance(outcome, BaseException):
            raise outcome
        (record, number), result = outcome
        if isinstance(result, NumericsError):
            raise result  # the target's own: no other answer of it is worth more
        if isinstance(result, InputError):
            if record not in failed:
                failed.add(record)
                yield record, result
            continue
        answers = found.setdefault(record, {})
        answers[number] = tuple(result.tokens)
        if len(answers) == samples:
            del found[record]
            yield record, [answers[i] for i in range(samples)]


def _fitting(manifest: Manifest, batch: int, sessions: int) -> int:
    """At most `batch`, so that the caches of all sessions take no more than their share of the memory."""
    limits = manifest.limits
    stored = kv_bytes_per_sequence(manifest)
    stored += cross_kv_bytes_per_row(manifest) * (limits.max_source or limits.max_length)
    each = stored * 4 // ITEM_SIZES[manifest.cache_dtype]  # a CPU holds float32
    available = available_memory()
    return batch if available is None else max(1, min(batch, int(MEMORY_SHARE * available / sessions / each)))
