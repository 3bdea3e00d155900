"""Times of the engine at hand, without trtexec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...session.session import Session
from ..timing import BUDGET, GraphTimer, sampled_seconds
from .points import Point
from .results import Timing


def time_here(
    session: Session,
    points: Sequence[Point],
    cache: int,
    budget: float = BUDGET,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Timing]:
    """Every point on the session's engine, with `cache` key/value entries in use, taking turns within `budget` seconds
    (at least 15 runs each); graphs that the engine has not are left out. `progress` as for `sampled_seconds`."""
    engine = session.decoder.engine  # pyright: ignore[reportOptionalMemberAccess]
    source = points[0].sizes["source"] if points else 1
    points = [point for point in points if point.graph in engine.graphs]
    timer = GraphTimer(session.bundle, engine, cache=cache, source=source)
    arms = {
        point: timer.repeated(
            [point.graph], [timer.call(point.graph, point.width, point.sizes.get("rows"), point.given)]
        )
        for point in points
    }
    return [
        Timing(point.graph, point.profile, point.width, [1e3 * second for second in taken])
        for point, taken in sampled_seconds(arms, budget, wait=timer.wait, progress=progress).items()
    ]
