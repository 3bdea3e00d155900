"""How many records go through a target together: fewer where a GPU's memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from ...runtime.common.errors import CapacityError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches:
    """Sequences in parts of `size`, which is halved for good when PyTorch finds no memory; `report` is told what it became.

    Args:
        size: items of a part. flag: the option that sets it, where there is one.
    """

    def __init__(
        self,
        size: int,
        report: Callable[[str], None] = lambda line: None,
        what: str = "records",
        flag: str | None = "--batch-size",
    ) -> None:
        self.size, self._report, self._what, self._flag = size, report, what, flag

    def over(
        self, items: Sequence[Item], run: Callable[[Sequence[Item]], Result]
    ) -> Iterator[tuple[range, Result]]:
        """The places of each part, and what `run` makes of it. A part that did not fit is run again, in halves: `run` must
        leave nothing behind where it fails.

        Raises CapacityError where one item alone does not fit.
        """
        at, asked = 0, self.size
        while at < len(items):
            places = range(at, min(at + self.size, len(items)))
            result = self._tried(items[at : places.stop], run)
            if result is None:
                self.size = (len(places) + 1) // 2
                continue
            if self.size < asked:
                begin = f"; {self._flag} {self.size} begins with as many" if self._flag else ""
                self._report(f"memory ran out with {asked} {self._what} at once: now {self.size}{begin}")
                asked = self.size
            yield places, result[0]
            at = places.stop

    def _tried(self, items: Sequence[Item], run: Callable[[Sequence[Item]], Result]) -> tuple[Result] | None:
        """None where the memory ran out, and more than one item might have been too many."""
        try:
            return (run(items),)
        except torch.OutOfMemoryError as error:
            if len(items) == 1:
                raise CapacityError(
                    f"no memory for one of the {self._what} alone ({str(error).splitlines()[0]:.200}); use a GPU with more "
                    "memory or --device cpu, a smaller model, or smaller limits"
                ) from error
        # Outside of the handler: what the traceback held is free now.
        torch.cuda.empty_cache()
        return None
