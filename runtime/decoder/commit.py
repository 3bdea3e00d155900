"""Cache slots of accepted paths: brought right behind their roots where a tree had them elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..engines.base import Call, Engine
from ..engines.buffers import HostBuffer
from .kv_cache import KVArena


class Commit:
    """The graph `commit`: gathers slots of every sequence and writes them contiguously, all layers in one call."""

    def __init__(
        self, engine: Engine, arena: KVArena, num_layers: int, max_width: int, write_indices: HostBuffer
    ):
        """`write_indices` int64 [max_batch]: memory that passes use, too."""
        self._engine, self._arena, self._num_layers = engine, arena, num_layers
        self._sources = HostBuffer(engine, "source_rows", arena.max_batch * max_width, "int64")
        self._targets = write_indices
        self._calls: dict[tuple[int, int], Call] = {}
        """By [batch, width]."""

    def clear(self) -> None:
        """Forget what is bound."""
        self._calls.clear()

    def move(self, path: Sequence[int], batch_index: int) -> None:
        """Bring the slots of the nodes `path` of one sequence right behind its root, if any lie elsewhere."""
        if not _is_moved(path):
            return
        start, width = self._arena.lengths[batch_index], len(path)
        moves = [(np.arange(width), 0)] * self._arena.batch  # the others write what they hold over themselves
        moves[batch_index] = (start + np.asarray(path), start + 1)
        self._run(moves, width)

    def move_all(self, paths: Sequence[Sequence[int]]) -> None:
        """The same for every sequence after one pass over all, in one call."""
        moved = [_is_moved(path) for path in paths]
        if not any(moved):
            return
        width = max(map(len, paths))
        moves = []
        for path, length, is_moved in zip(paths, self._arena.lengths, moved, strict=False):
            # Slots that the pass has just written, over themselves, wherever nothing moves.
            slots = length + (1 if is_moved else 0) + np.arange(width)
            if is_moved:
                slots[: len(path)] = length + np.asarray(path)
            moves.append((slots, length + (1 if is_moved else 0)))
        self._run(moves, width)

    def _run(self, moves: Sequence[tuple[np.ndarray, int]], width: int) -> None:
        """`moves`: of every sequence the `width` slots, and the slot where they go."""
        batch = len(moves)
        shape = (batch, width)
        sources, targets = self._sources.host(shape), self._targets.host((batch,))
        for batch_index, (slots, start) in enumerate(moves):
            sources[batch_index], targets[batch_index] = slots, start
        self._sources.push(shape)
        self._targets.push((batch,))
        call = self._calls.get(shape)
        if call is None:
            inputs, outputs = self._arena.bindings(0, self._num_layers)
            inputs["source_rows"] = self._sources.view(shape)
            inputs["write_indices"] = self._targets.view((batch,))
            call = self._calls[shape] = self._engine.bind("commit", inputs, outputs)
        call.run()


def _is_moved(path: Sequence[int]) -> bool:
    """Whether a node of the path lies elsewhere than right behind the one before it."""
    return any(node != place + 1 for place, node in enumerate(path))
