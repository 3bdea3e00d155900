"""Work that is keyed by a number, done in order by other processes ahead of who asks for it: the batches of a training on a GPU,
which waits for texts otherwise, and the blocks of rows. Each process has one thread."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


class _Steps(Dataset[T], Generic[T]):
    def __init__(self, draw: Callable[[int], T]) -> None:
        self.draw = draw

    def __getitem__(self, step: int) -> T:
        return self.draw(step)


def drawn_ahead(draw: Callable[[int], T], last: int, workers: int) -> Callable[[int], T]:
    """What `draw` gives for a step, asked for one after the other from any first one up to `last`, not included.

    Args:
        draw: gives the same for the same step, in any process; it runs in forks, and must leave a GPU alone.
        workers: processes; 0 draws here, when a step is asked for.

    The function that is returned raises ValueError for a step out of turn, except where nothing is drawn ahead.
    """
    if not workers:
        return draw
    steps: Iterator[T] | None = None
    expected = 0

    def ask(step: int) -> T:
        nonlocal steps, expected
        if steps is None:
            expected = step
            loader = DataLoader(
                _Steps(draw),
                batch_size=None,
                sampler=range(step, last),  # pyright: ignore[reportArgumentType]
                num_workers=workers,
                prefetch_factor=2,
                multiprocessing_context="fork",
                worker_init_fn=_alone,
            )
            steps = iter(loader)
        if step != expected:
            raise ValueError(f"step {step} was asked for, {expected} comes next")
        expected += 1
        return next(steps)

    return ask


def _alone(_: int) -> None:
    """A stop is for the process that trains: it ends the workers when its step is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
