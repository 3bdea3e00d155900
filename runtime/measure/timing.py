"""Time the graphs of a bundle alone, through the engine interface, on buffers of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..bundle.manifest import FLOATS
from ..decode.floats import widen
from ..decode.kv import BUCKET
from ..engines.base import DTYPES
from ..speculate.costs import FREE, CostTable, Curve, DraftCosts

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..bundle.manifest import DraftInfo
    from ..engines.base import Call, Engine, View

BUDGET = 8.0
"""Seconds spent on all passes together, so that large models are timed in bearable time."""

BLOCK = 5
"""Runs of the same pass in a row, as decoding does them: their weights are then in the processor's caches."""

Arm = TypeVar("Arm", bound=Hashable)


class GraphTimer:
    """Binds graphs of one session's engine for a given width; nothing of the session's state is touched."""

    def __init__(self, bundle: Bundle, engine: Engine, cache: int, source: int):
        """`cache`: key/value rows in use, rounded up to the arena's steps of 128; `source`: encoder rows (ignored
        without an encoder)."""
        limits = bundle.manifest.limits
        self._manifest, self._engine = bundle.manifest, engine
        self._table = np.asarray(bundle.tensor("embedding_table"))
        capacity = limits.max_length + limits.max_width
        rows = min(-(-max(cache, 1) // BUCKET) * BUCKET, capacity)
        self._sizes = {
            "batch": 1,
            "cache": capacity if engine.static_cache else rows,
            "source": max(source, 1),
        }
        self._views: dict[Any, View] = {}
        self._rng = np.random.default_rng(0)

    def calls(self, graphs: Iterable[str], width: int) -> list[Call]:
        """Calls of these graphs over `width` new positions at the end of the cache."""
        return [self._bind(graph, width) for graph in graphs]

    def costs(self, drafts: Iterable[DraftInfo], widths: Iterable[int]) -> CostTable:
        """Median seconds of the passes of plain decoding and of these drafts, at 1 and at `widths` new positions.

        Drafts that branch off after a layer get tail, trunk and proposal; heads on the last row run once per cycle; a
        draft without graphs runs on the host and costs nothing. Another kind is left out: its default share stands.
        """
        manifest, segments = self._manifest, self._manifest.segments
        # On an engine in host memory the decoder reads embedding rows from the table, without a graph.
        embed = [] if self._engine.host_memory else ["embed"]
        found = list(drafts)
        cuts = {draft.layer: manifest.decoder.cuts.index(draft.layer) for draft in found if draft.layer}
        arms: dict[tuple[str, Any, int], list[Call]] = {}
        for width in sorted({1, *widths}):
            arms["plain", None, width] = self.calls([*embed, *segments, "head"], width)
            for layer, cut in cuts.items():
                arms["tail", layer, width] = self.calls([*segments[cut:], "head"], width)
        for layer, cut in cuts.items():
            arms["trunk", layer, 1] = self.calls([*embed, *segments[:cut]], 1)
        for draft in found:
            if draft.layer:
                arms["propose", draft.name, 1] = self.calls([*draft.graphs.values(), "head"], 1)
            elif draft.heads:
                arms["once", draft.name, 1] = self.calls(draft.graphs.values(), 1)
        seconds = median_seconds(arms)

        def curve(what: str, which: Any) -> Curve:
            return Curve({arm[2]: value for arm, value in seconds.items() if arm[:2] == (what, which)})

        costs = {draft.name: FREE for draft in found if not draft.layer and not draft.graphs}
        for draft in found:
            if draft.layer:
                costs[draft.name] = DraftCosts(
                    curve("tail", draft.layer),
                    seconds["trunk", draft.layer, 1],
                    seconds["propose", draft.name, 1],
                )
            elif draft.heads:
                costs[draft.name] = DraftCosts(once=seconds["once", draft.name, 1])
        return CostTable(curve("plain", None), costs)

    def _bind(self, graph: str, width: int) -> Call:
        info = self._engine.interface(graph)
        inputs = {
            value.name: self._view(value.name, value.dtype, value.shape, width) for value in info.inputs
        }
        outputs = {}
        for value in info.outputs:
            # A cache is written in place: the output is the input's address.
            before = value.name.removeprefix("updated_")
            outputs[value.name] = (
                inputs[before]
                if before in inputs
                else self._view(value.name, value.dtype, value.shape, width)
            )
        return self._engine.bind(graph, inputs, outputs)

    def _view(self, name: str, dtype: str, shape: Iterable[int | str], width: int) -> View:
        if name == "embedding_table":
            return self._engine.constant(name, self._table)
        sizes = self._sizes | {"width": width, "rows": width}
        actual = tuple(size if isinstance(size, int) else sizes[size] for size in shape)
        key = (name, dtype, actual)
        if key not in self._views:
            nbytes = prod(actual) * DTYPES[dtype].itemsize
            view = self._engine.allocate(f"timing.{name}.{len(self._views)}", nbytes).view(actual, dtype)
            content = self._content(name, dtype, actual, width)
            if content is not None:
                self._engine.write(view, content)
            self._views[key] = view
        return self._views[key]

    def _content(self, name: str, dtype: str, shape: tuple[int, ...], width: int) -> np.ndarray | None:
        """Values that cost what real ones cost: everything visible, no zeros or denormals in hidden rows."""
        cache = self._sizes["cache"]
        if dtype == "bool":
            return np.ones(shape, bool)
        if name == "row_index":
            return np.arange(width, dtype=np.int64)
        if name == "write_indices":
            return None  # slot 0: where rows are written does not change what a pass costs
        if name == "positions":
            return np.arange(cache - width, cache, dtype=np.int64).reshape(shape)
        if name.endswith("mask"):
            return None  # a float mask of zeros: everything is visible
        if dtype in FLOATS:
            return widen(self._rng.standard_normal(shape, dtype=np.float32), DTYPES[dtype])
        return None


def median_seconds(arms: Mapping[Arm, list[Call]], budget: float = BUDGET) -> dict[Arm, float]:
    """Median seconds of running each arm's calls in order.

    The arms take turns, so that a machine that slows down slows all of them; 2 rounds warm up, then 3 to 40
    rounds are measured within the budget.
    """
    seconds: dict[Arm, list[float]] = {arm: [] for arm in arms}

    def round_seconds() -> float:
        start = time.perf_counter()
        for arm, calls in arms.items():
            for _ in range(BLOCK):
                begin = time.perf_counter()
                for call in calls:
                    call.run()
                seconds[arm].append(time.perf_counter() - begin)
        return time.perf_counter() - start

    round_seconds()
    rounds = max(3, min(40, int(budget / max(round_seconds(), 1e-9))))
    for taken in seconds.values():
        taken.clear()
    for _ in range(rounds):
        round_seconds()
    return {arm: statistics.median(taken) for arm, taken in seconds.items()}
