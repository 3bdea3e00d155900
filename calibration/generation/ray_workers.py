"""`Workers` on a Ray cluster: each actor has a session of its own, and answers a wave at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial

from ...runtime.common.ray_actors import Actors, Wave
from ..data.reading.records import Record
from .answers import GenerationOptions
from .decoding import Ask, Decoding, Outcome
from .messages import Start

Asked = tuple[list[Ask], GenerationOptions]


class RayWorkers:
    """Answers waves as `Workers` does.

    Args:
        address: of the cluster. start: what each actor loads. whole_nodes: whether a session uses all cores of a node, or one.

    Raises:
        OptionError: no cluster answers there.
    """

    def __init__(self, address: str, start: Start, whole_nodes: bool) -> None:
        self._actors = Actors(address, partial(_decoding, start), whole_nodes)

    def waves(
        self, asked: Sequence[Ask], waves: Sequence[range], options: GenerationOptions
    ) -> Generator[tuple[int, Outcome], None, None]:
        """What comes of each of `asked`, with its place, as soon as its wave has ended. Raises what `Actors.answers` raises."""
        sent = (
            Wave(wave, (list(some), options), _files(record for record, _ in some))
            for wave in waves
            if (some := asked[wave.start : wave.stop])
        )
        with closing(self._actors.answers(sent)) as answers:
            for wave, outcomes in answers:
                for place, outcome in outcomes:
                    yield wave[place], outcome

    def close(self) -> None:
        """Leave the cluster."""
        self._actors.close()


def _files(records: Iterable[Record]) -> list[str]:
    """The files and folders that records name."""
    images = [record.image for record in records if record.image is not None]
    return sorted({name for image in images for name in (image.file, image.video) if name is not None})


def _decoding(start: Start) -> Callable[[Asked], list[tuple[int, Outcome]]]:
    """In an actor: what answers a wave by one session, which is kept."""
    decoding = Decoding(start.bundle, start.batch, None, start.speculative)
    return lambda asked: list(decoding.wave(*asked))
