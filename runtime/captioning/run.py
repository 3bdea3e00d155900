"""One run over an index of pictures: a session answers them in batches, shards are written as they are complete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..common.errors import ImageError, InputError, NumericsError
from ..common.parts import Part
from ..session.result import Result
from .index import Index, Picture
from .output import Output, Row

if TYPE_CHECKING:
    from ..session.session import Session

Outcome = Result | InputError | NumericsError


class Captioner(Protocol):
    """Answers pictures, in any order."""

    def captions(self, pictures: Iterable[tuple[int, Picture]]) -> Generator[tuple[int, Outcome], None, None]:
        """(row, what came of it) of each (row, picture), which is taken when there is room for it."""
        ...


class SessionCaptioner:
    """`Captioner` by one session, which decodes as many pictures together as it has room for.

    Args:
        load: gives the session, whose `max_batch` is that room, when there is something to caption. It is closed behind that.
        prompt: of every picture. options: of `Session.generate`.
    """

    def __init__(
        self, load: Callable[[], AbstractContextManager[Session]], prompt: Any, options: Mapping[str, Any]
    ) -> None:
        self._load, self._prompt, self._options = load, prompt, options

    def captions(self, pictures: Iterable[tuple[int, Picture]]) -> Generator[tuple[int, Outcome], None, None]:
        """See `Captioner`. Raises `OptionError`, and what reading the index and loading the session raise."""
        asked: list[int] = []
        refused: list[tuple[int, Outcome]] = []

        def requests() -> Iterator[dict[str, Any]]:
            for row, picture in pictures:
                if isinstance(picture, ImageError):
                    refused.append((row, picture))
                    continue
                asked.append(row)
                yield {"image": picture, "prompt": self._prompt, **self._options}

        with self._load() as session, closing(session.generate_many(requests())) as outcomes:  # type: ignore[type-var]
            for number, outcome in outcomes:
                yield from _emptied(refused)
                yield asked[number], outcome
        yield from _emptied(refused)


@dataclass(frozen=True)
class Captioned:
    """What one call did: rows and shards of the whole or of the part, shards that it wrote (the others were there), and for
    these the pictures, how many of them could not be captioned, the tokens, and the seconds."""

    rows: int
    shards: int
    written: int
    pictures: int
    errors: int
    tokens: int
    seconds: float


def caption_all(
    captioner: Captioner,
    index: Index,
    output: Output,
    shard_size: int,
    part: Part | None = None,
    report: Callable[[int, int, float], None] = lambda done, total, seconds: None,
) -> Captioned:
    """Captions every picture of an index, or those of a part, into an output that the caller has claimed. A picture that
    cannot be captioned becomes a row with an error.

    Args:
        shard_size: rows of a shard. report: is told, after each picture, how many of how many this call has done, and in how
            many seconds.

    Raises:
        InputError: the index cannot be read any further. OSError: nothing can be written.
    """
    own = [row for row, key in enumerate(index.keys) if part is None or part.holds(key)]
    count = max(1, -(-len(own) // shard_size))  # one that is empty says what run it was
    missing = output.missing(count)
    shards = {number: own[number * shard_size : (number + 1) * shard_size] for number in missing}
    shard_of = {row: number for number, rows in shards.items() for row in rows}
    left = Counter(shard_of.values())
    found: dict[int, Row] = {}
    begin, done, errors, tokens = time.perf_counter(), 0, 0, 0
    for number in [number for number in missing if not left[number]]:
        output.write(number, [])
    with closing(captioner.captions(index.pictures(list(shard_of)))) as outcomes:
        for row, outcome in outcomes if shard_of else ():  # loads nothing where nothing is left
            found[row] = made = _row(row, index.keys[row], outcome)
            errors += made.error is not None
            tokens += made.tokens or 0
            done += 1
            number = shard_of[row]
            left[number] -= 1
            if not left[number]:
                output.write(number, [found.pop(each) for each in shards[number]])
            report(done, len(shard_of), time.perf_counter() - begin)
    output.finish(count)
    seconds = round(time.perf_counter() - begin, 2)
    return Captioned(len(own), count, len(missing), done, errors, tokens, seconds)


def _row(row: int, key: str, outcome: Outcome) -> Row:
    """A line of the output. What no UTF-8 can hold in a key becomes `?`."""
    key = key.encode("utf-8", "replace").decode()
    if isinstance(outcome, Result):
        return Row(row, key, outcome.text, len(outcome.tokens), outcome.finish_reason, outcome.lossy)
    return Row(row, key, error=str(outcome).encode("utf-8", "replace").decode())


def _emptied(refused: list[tuple[int, Outcome]]) -> Sequence[tuple[int, Outcome]]:
    taken, refused[:] = refused[:], []
    return taken
