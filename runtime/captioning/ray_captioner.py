"""`Captioner` on a Ray cluster: each actor has a session, and takes waves of pictures."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import islice
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..common.ray_actors import Actors, Wave
from .index import Picture
from .run import Outcome, SessionCaptioner

if TYPE_CHECKING:
    from ..session.session import Session

BATCHES = 4
"""Of a session, in one wave: at a wave's end places of the batch stay empty, and a wave is what a lost actor costs."""

Asked = list[tuple[int, Picture]]


class RayCaptioner:
    """Answers as `SessionCaptioner` does, in another order.

    Args:
        address: of the cluster. load: as of `SessionCaptioner`; it can be pickled. max_batch: of the sessions.
        whole_nodes: whether a session uses all cores of a node, or one.

    Raises:
        OptionError: no cluster answers there.
    """

    def __init__(
        self,
        address: str,
        load: Callable[[], AbstractContextManager[Session]],
        prompt: Any,
        options: Mapping[str, Any],
        max_batch: int,
        whole_nodes: bool,
    ) -> None:
        self._actors = Actors(address, partial(_captioning, load, prompt, options), whole_nodes)
        self._size = BATCHES * max_batch

    def captions(self, pictures: Iterable[tuple[int, Picture]]) -> Generator[tuple[int, Outcome], None, None]:
        """See `Captioner`. Raises what `Actors.answers` raises, and what reading the index raises."""
        with closing(self._actors.answers(self._waves(pictures))) as answers:
            for _, outcomes in answers:
                yield from outcomes

    def close(self) -> None:
        """Leave the cluster."""
        self._actors.close()

    def _waves(self, pictures: Iterable[tuple[int, Picture]]) -> Iterator[Wave[int]]:
        left = iter(pictures)
        while wave := list(islice(left, self._size)):
            yield Wave(wave[0][0], wave, [str(each) for _, each in wave if isinstance(each, PathLike)])


def _captioning(
    load: Callable[[], AbstractContextManager[Session]], prompt: Any, options: Mapping[str, Any]
) -> Callable[[Asked], list[tuple[int, Outcome]]]:
    """In an actor: what captions a wave by one session, which is kept."""
    session = load().__enter__()
    captioner = SessionCaptioner(lambda: nullcontext(session), prompt, options)
    return lambda asked: list(captioner.captions(asked))
