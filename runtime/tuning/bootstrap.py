"""How sure a figure is: the bootstrap (Efron), which draws the samples it was made of again and again."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

DRAWS = 1000

FEWEST = 5
"""Of fewer entries no interval is given: it would look sure of itself because nothing differs."""


def interval(statistic: Callable[..., float], *samples: Sequence[Any]) -> tuple[float, float] | None:
    """The 95 % interval of `statistic(*samples)`, every sample drawn anew by itself; None where one has too few entries.

    Entries are what can be taken to be independent: requests, not their tokens. The same samples give the same interval.
    """
    if not samples or min(map(len, samples)) < FEWEST:
        return None
    rng = random.Random(0)
    draws = sorted(statistic(*(rng.choices(each, k=len(each)) for each in samples)) for _ in range(DRAWS))
    return draws[DRAWS * 25 // 1000], draws[DRAWS * 975 // 1000 - 1]
