"""Time the graphs of a bundle alone, through the engine interface, on buffers of their own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..decoder.kv_cache import BUCKET
from ..engines.base import DTYPES
from ..graphs.registry import graph_role
from ..graphs.values import embedding_tensors
from .pass_costs import cost_table, passes
from .synthetic_inputs import named_sizes, pass_sizes, stand_in

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..bundle.manifest import DraftInfo, ValueInfo
    from ..engines.base import Call, Engine, View
    from ..speedup.cost_model import CostTable

BUDGET = 8.0
"""Seconds spent on all passes together, so that large models are timed in bearable time."""

BLOCK = 5
"""Runs of the same pass in a row, as decoding does them: their weights are then in the processor's caches."""

Arm = TypeVar("Arm", bound=Hashable)


class GraphTimer:
    """Binds graphs of one session's engine for a given width; nothing of the session's state is touched."""

    def __init__(self, bundle: Bundle, engine: Engine, cache: int, source: int):
        """`cache`: key/value entries in use, rounded up to the arena's steps of 128; `source`: encoder positions
        (ignored without an encoder)."""
        limits = bundle.manifest.limits
        self._manifest, self._engine = bundle.manifest, engine
        self._tables = {name: np.asarray(bundle.tensor(name)) for name in embedding_tensors(bundle.manifest)}
        capacity = limits.max_length + limits.max_width
        cache_len = min(-(-max(cache, 1) // BUCKET) * BUCKET, capacity)
        self._sizes = {
            "batch": 1,
            "cache": capacity if engine.static_cache else cache_len,
            "distances": capacity + 1,
            "source": max(source, 1),
        }
        if bundle.manifest.decoder.max_positions is not None:
            self._sizes["max_positions"] = bundle.manifest.decoder.max_positions
        self._views: dict[Any, View] = {}
        self._mark: View | None = None
        self._rng = np.random.default_rng(0)

    def calls(self, graphs: Iterable[str], width: int) -> list[Call]:
        """Calls of these graphs over `width` new positions at the end of the cache."""
        return [self.call(graph, width) for graph in graphs]

    def call(
        self,
        graph: str,
        width: int,
        num_logits: int | None = None,
        given: Mapping[str, np.ndarray] = MappingProxyType({}),
    ) -> Call:
        """One call. `num_logits`: positions that the head sees, by default all. `given`: inputs that are not made up, which
        say how large the dimensions of their names are."""
        info = self._engine.interface(graph)
        sizes = self._sizes | pass_sizes(width, num_logits) | {"image_rows": width}
        sizes |= named_sizes(((value.name, tuple(value.shape)) for value in info.inputs), given)

        def view(value: ValueInfo) -> View:
            return self._view(value.name, value.dtype, value.shape, sizes, given.get(value.name))

        inputs = {value.name: view(value) for value in info.inputs}
        outputs = {}
        for value in info.outputs:
            # A cache is written in place: the output is the input's address.
            before = value.name.removeprefix("updated_")
            outputs[value.name] = inputs[before] if before in inputs else view(value)
        return self._engine.bind(graph, inputs, outputs)

    def repeated(self, graphs: Iterable[str], calls: Sequence[Call]) -> Sequence[Call]:
        """These calls of these graphs as decoding runs them: captured, on an engine that does that. Graphs that do not run
        again and again between two tokens are timed as they are."""
        if not all(graph_role(self._engine.interface(graph).role).captures for graph in graphs):
            return calls
        return self._engine.repeated(calls)

    def costs(self, drafts: Iterable[DraftInfo], widths: Iterable[int]) -> CostTable:
        """Median seconds of the passes of plain decoding and of these drafts, at 1 and at `widths` new positions."""
        drafts = list(drafts)
        # On an engine in host memory the decoder reads embedding rows from the table, without a graph.
        made_of = passes(self._manifest, drafts, widths, embed=not self._engine.host_memory)
        arms = {each: self.repeated(graphs, self.calls(graphs, each[2])) for each, graphs in made_of.items()}
        return cost_table(drafts, median_seconds(arms, wait=self.wait))

    def wait(self) -> None:
        """Return when everything that was run is done: an engine with a queue does it later."""
        if not self._engine.host_memory:
            if self._mark is None:
                self._mark = self._engine.allocate("timing.mark", 1, zeroed=True).view((1,), "uint8")
            self._engine.read(self._mark)

    def _view(
        self,
        name: str,
        dtype: str,
        shape: Iterable[int | str],
        sizes: Mapping[str, int],
        given: np.ndarray | None,
    ) -> View:
        if name in self._tables:
            return self._engine.constant(name, self._tables[name])
        actual = tuple(size if isinstance(size, int) else sizes[size] for size in shape)
        # Indices depend on the width; buffers of hidden states and caches, which are large, on their shape alone.
        key = (name, dtype, actual, sizes["width"] if dtype == "int64" else None)
        if key not in self._views:
            nbytes = prod(actual) * DTYPES[dtype].itemsize
            content = stand_in(name, dtype, actual, sizes, self._rng) if given is None else given
            buffer = self._engine.allocate(
                f"timing.{name}.{len(self._views)}", nbytes, zeroed=content is None
            )
            view = buffer.view(actual, dtype)
            if content is not None:
                self._engine.write(view, content)
            self._views[key] = view
        return self._views[key]


def median_seconds(
    arms: Mapping[Arm, Sequence[Call]], budget: float = BUDGET, wait: Callable[[], None] | None = None
) -> dict[Arm, float]:
    """Median of `sampled_seconds` by arm."""
    sampled = sampled_seconds(arms, budget, wait=wait)
    return {arm: statistics.median(taken) for arm, taken in sampled.items()}


def sampled_seconds(
    arms: Mapping[Arm, Sequence[Call]],
    budget: float = BUDGET,
    most: int = 40,
    wait: Callable[[], None] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Arm, list[float]]:
    """Seconds of running each arm's calls in order, several times, until `wait` returns.

    The arms take turns, so that a machine that slows down slows all of them; 2 rounds of `BLOCK` runs warm up, then 3 to
    `most` rounds are measured within the budget. `progress` is told the rounds done, and how many there will be.
    """
    seconds: dict[Arm, list[float]] = {arm: [] for arm in arms}

    def round_seconds() -> float:
        start = time.perf_counter()
        for arm, calls in arms.items():
            for _ in range(BLOCK):
                begin = time.perf_counter()
                for call in calls:
                    call.run()
                if wait is not None:
                    wait()
                seconds[arm].append(time.perf_counter() - begin)
        return time.perf_counter() - start

    round_seconds()
    rounds = max(3, min(most, int(budget / max(round_seconds(), 1e-9))))
    for taken in seconds.values():
        taken.clear()
    for done in range(rounds):
        progress(done, rounds)
        round_seconds()
    return seconds
