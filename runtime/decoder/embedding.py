"""Token ids to hidden states: from the memory-mapped table where the host can write them, else by the `embed` graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..common.bfloat16 import widen
from ..common.errors import PromptError
from ..engines.base import DTYPES, Call, Engine, View
from ..engines.buffers import HostBuffer

PROBES = 16
"""Ids that decide whether the `embed` graph is a plain look-up."""


class Embedding:
    """Embeddings of token ids, in the dtype that the engine's graphs take.

    One memory-mapped row into a bound buffer takes a quarter of the time of running a graph for it; that way is taken
    (`lookup`) only on engines in host memory and when the graph is a plain look-up, which the first ids decide.
    """

    def __init__(
        self,
        engine: Engine,
        tensors: Mapping[str, np.ndarray],
        hidden: HostBuffer,
        max_tokens: int,
        most_of_prompt: int,
        scale: float | None = None,
    ):
        """`tensors` are those of `EMBEDDING`, as stored; `hidden` receives hidden states, at most `max_tokens` of them, of
        a prompt `most_of_prompt` at a time; `scale` is the manifest's `decoder.embedding_scale`."""
        self._engine, self._hidden = engine, hidden
        self._table, self._scales = tensors["embedding_table"], tensors.get("embedding_scales")
        self._most = most_of_prompt
        self.dtype = engine.dtype("embed", "hidden")
        self._scale = None if scale is None else DTYPES[self.dtype].type(scale)
        self.constants = {name: engine.constant(name, tensor) for name, tensor in tensors.items()}
        """The tensors as stored, where the engine has them."""
        self._shape = self._table.shape if self._scales is None else self._table.shape[::-1]
        """V, E."""
        self._tokens = HostBuffer(engine, "token_ids", max_tokens, "int64")
        self.lookup = False
        self.table: np.ndarray | None = None
        """The table itself where its rows can be copied as they are: `lookup` in the dtype of the graphs."""
        if engine.host_memory:
            probe = np.linspace(0, self._shape[0] - 1, min(PROBES, max_tokens), dtype=np.int64)
            self.lookup = np.array_equal(self._by_graph(probe), self._by_table(probe))
            if self.lookup and scale is None and self._table.dtype == DTYPES[self.dtype]:
                self.table = self._table

    @property
    def vocabulary(self) -> int:
        """V."""
        return self._shape[0]

    def check(self, ids: np.ndarray) -> None:
        """Raise `PromptError` for ids outside the vocabulary."""
        words = self.vocabulary
        if ids.size and not 0 <= ids.min() <= ids.max() < words:
            bad = int(ids[(ids < 0) | (ids >= words)][0])
            raise PromptError(f"token id {bad} is outside the vocabulary of {words}")

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Hidden states [n, E] of int64 ids [n]. Raises `PromptError` for ids outside the vocabulary."""
        self.check(ids)
        return self._by_table(ids) if self.lookup else self._by_graph(ids)

    def fill(self, out: np.ndarray, tokens: Sequence[int]) -> None:
        """Embeddings of `tokens` [n] into `out` [n, E], the host side of `hidden`; `lookup` only."""
        if self.table is None:
            out[...] = self._by_table(np.asarray(tokens, np.int64))
        else:
            self.table.take(tokens, 0, out, "clip")

    def run(self, tokens: Sequence[int], shape: tuple[int, int]) -> None:
        """Run the graph on `tokens` as [batch, width]; the hidden states are then in `hidden` on the engine's side."""
        self._tokens.host((len(tokens),))[:] = tokens
        self._tokens.push(shape)
        self.bind(self._tokens.view(shape)).run()

    def bind(self, tokens: View) -> Call:
        """The graph on ids int64 [batch, width] that lie with the engine; the hidden states are then in `hidden`."""
        inputs = {"token_ids": tokens, **self.constants}
        return self._engine.bind("embed", inputs, {"hidden": self._view(tokens.shape)})

    def _view(self, shape: tuple[int, ...]) -> View:
        return self._hidden.view((*shape, self._shape[1]))

    def _by_graph(self, ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), self._shape[1]), DTYPES[self.dtype])
        for start in range(0, len(ids), self._most):
            part = ids[start : start + self._most]
            self.run(part.tolist(), (1, len(part)))
            out[start : start + len(part)] = self._engine.read(self._view((1, len(part))))[0]
        return out

    def _by_table(self, ids: np.ndarray) -> np.ndarray:
        rows = self._rows(ids)
        return rows if self._scale is None else np.multiply(rows, self._scale, out=rows)

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows [n, E] of the table, a copy."""
        if self._scales is None:
            return widen(self._table[ids], DTYPES[self.dtype])
        scales = widen(self._scales[:, ids], DTYPES[self.dtype])  # [E / block, n]
        integers = self._table[:, ids].reshape(len(scales), -1, len(ids))
        return np.ascontiguousarray((integers * scales[:, None]).reshape(-1, len(ids)).T)
