"""What a ViSpec layer sees of pictures, by place of a pass: rows of a table at a fixed address."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np

from ...engines.buffers import HostBuffer

if TYPE_CHECKING:
    from ...engines.base import Engine, View
    from .vispec_pairs import Pair


class VisualEmbeds:
    """Inputs `visual`, `visual_index` and `compressed` of the graph `vispec`.

    The table's first `batch` rows are the global features that sequences know, by place: they are what every place of a
    pass sees unless `mark` says otherwise. The rows behind are of the one prompt whose pairs a pass runs.
    """

    def __init__(
        self, name: str, engine: Engine, graph: str, size: int, batch: int, max_hidden: int, max_places: int
    ):
        """`max_hidden`: of a pass over one prompt's hidden states; `max_places`: of any pass."""
        self._engine, self._name = engine, name
        self._batch, self._most = batch, batch + max_hidden
        self._shape = self._most, size
        self._table = HostBuffer(engine, f"{name}.visual", self._most * size, engine.dtype(graph, "visual"))
        self._index = HostBuffer(engine, f"{name}.visual_index", max_places, "int64")
        self._compressed = HostBuffer(engine, f"{name}.compressed", max_places, "bool")
        self._embeds = self._table.host(self._shape)
        self._embeds[:] = 0
        self._table.push(self._shape)
        self._places: tuple[np.ndarray, np.ndarray]

    def know(self, batch_index: int, feature: np.ndarray | None) -> None:
        """Let the sequence at `batch_index` know the global feature [E], or none."""
        self._embeds[batch_index] = 0 if feature is None else feature
        self._table.push(self._shape)

    def move(self, source: int, batch_index: int) -> None:
        """Let the sequence at `batch_index` know what that in `source` does."""
        self.know(batch_index, self._embeds[source].copy())

    def begin(self, batch: int, width: int, batch_index: int) -> None:
        """See `Beside`."""
        index, compressed = self._index.host((batch, width)), self._compressed.host((batch, width))
        index[:], compressed[:] = batch_index + np.arange(batch)[:, None], False
        self._places = index, compressed

    def mark(self, batch_index: int, pairs: Items[Pair]) -> None:
        """The first places at `batch_index` of the pass that begins see what these pairs of a prompt do."""
        index, compressed = self._places
        known: dict[int, int] = {}
        for place, pair in enumerate(pairs):
            at = known.setdefault(id(pair.visual), self._batch + len(known))
            self._embeds[at] = 0 if pair.visual is None else pair.visual
            index[batch_index, place], compressed[batch_index, place] = at, pair.compressed
        self._table.push(self._shape)

    def push(self, shape: tuple[int, int]) -> None:
        """See `Beside`."""
        self._index.push(shape)
        self._compressed.push(shape)

    def views(self, shape: tuple[int, int]) -> dict[str, View]:
        """See `Beside`."""
        return {
            "visual": self._table.view(self._shape),
            "visual_index": self._index.view(shape),
            "compressed": self._compressed.view(shape),
        }

    def behind(self, shape: tuple[int, int]) -> dict[str, View]:
        """See `Beside`: the global feature that the sequence in place 0 knows."""
        engine, name = self._engine, self._name
        return {
            "visual": self._table.view(self._shape),
            "visual_index": engine.constant(f"{name}.visual_index.{shape[1]}", np.zeros(shape, np.int64)),
            "compressed": engine.constant(f"{name}.compressed.{shape[1]}", np.zeros(shape, np.bool_)),
        }
