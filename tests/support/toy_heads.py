"""The toy with Medusa heads: the real proposer on an engine of a few lines of numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from vlmexport.runtime.bundle.manifest import DraftInfo
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.medusa.medusa import Medusa
from vlmexport.runtime.engines.base import DTYPES, Buffer, Engine, View
from vlmexport.runtime.speculative.sequence import Sequence as Request

from tests.support.toy import PROMPT, ToyDecoder

SIZE = 2
"""A row holds the last two tokens of its prefix."""

Heads = Callable[[np.ndarray], np.ndarray]
"""Logits [heads, V] from a row [2]."""


class NumpyEngine(Engine):
    """Runs one graph, `medusa`."""

    name = "numpy"
    host_memory = True

    def __init__(self, heads: Heads) -> None:
        super().__init__({})
        self._heads = heads

    def interface(self, graph: str) -> Any:
        names = {"inputs": ("hidden", "row_index"), "outputs": ("token_ids", "log_probabilities")}
        return SimpleNamespace(
            **{kind: [SimpleNamespace(name=n) for n in found] for kind, found in names.items()}
        )

    def allocate(self, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        data = np.zeros(nbytes, np.uint8)
        return Buffer(name, nbytes, data.ctypes.data, data)

    def read(self, view: View) -> np.ndarray:
        start = view.address - view.buffer.address
        return view.buffer.data[start : start + view.nbytes].view(DTYPES[view.dtype]).reshape(view.shape)

    def write(self, view: View, array: np.ndarray) -> None:
        self.read(view)[...] = array

    def _bind(self, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Any:
        def run() -> None:
            rows = self.read(inputs["hidden"])[self.read(inputs["row_index"]), 0]
            ids, scores = self.read(outputs["token_ids"]), self.read(outputs["log_probabilities"])
            for at, row in enumerate(rows):
                logits = self._heads(row).astype(np.float64)
                found = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                ids[at] = np.argsort(-found, kind="stable")[:, : ids.shape[2]]
                scores[at] = np.take_along_axis(found, ids[at], -1)

        return SimpleNamespace(run=run)


class ToyWithHeads(ToyDecoder):
    """`ToyDecoder` with what Medusa asks of a decoder."""

    dtype = "float32"

    def __init__(self, law: Callable, vocabulary: int, heads: Heads, max_batch: int = 1) -> None:
        super().__init__(law, vocabulary)
        self.engine = NumpyEngine(heads)
        self.arena = SimpleNamespace(max_batch=max_batch)
        self.manifest = SimpleNamespace(
            text=SimpleNamespace(vocab_size=vocabulary), decoder=SimpleNamespace(hidden_size=SIZE)
        )
        self._verified = self.engine.allocate("verified", self.widest_tree * SIZE * 4).view(
            (1, self.widest_tree, SIZE), "float32"
        )

    def rows_of(self, prefixes: Sequence[Sequence[int]]) -> View:
        """Rows [1, n, 2] after these prefixes, where the engine has them."""
        view = self._verified.buffer.view((1, len(prefixes), SIZE), "float32")
        self.engine.write(view, np.array([[list(prefix)[-2:] for prefix in prefixes]], np.float32))
        return view

    def verified_hidden(self, row: int, nodes: int) -> View:
        tree: TokenTree = self._trees[row]
        # `accept_all` has lengthened the cache already: the prefix is what stood before the root.
        before = self._before[row]
        prefixes = []
        for node in range(nodes):
            path, up = [], node
            while up >= 0:
                path.append(tree.tokens[up])
                up = tree.parents[up]
            prefixes.append([*before, *reversed(path)])
        return self.rows_of(prefixes)

    def accept_all(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]]) -> None:
        self._before = [list(cache) for cache in self.caches]
        super().accept_all(trees, paths)


def medusa(decoder: ToyWithHeads, heads: int, ranks: int, tree: list[int] | None = None) -> Medusa:
    """The proposer; it still has to see the prompt (`begin_with`)."""
    options = {"heads": heads, "ranks": ranks, "tree": tree}
    entry = {"name": "medusa", "kind": "medusa", "graphs": {"medusa": "medusa"}, **options}
    return Medusa(DraftInfo.parse(entry, "draft"), decoder)  # type: ignore[arg-type]


def without_tree(draft: DraftInfo) -> DraftInfo:
    """Medusa's draft, which then grows trees by its own probabilities."""
    return replace(draft, options=replace(draft.options, tree=None))  # type: ignore[call-arg]


def begin_with(proposer: Medusa, decoder: ToyWithHeads, request: Request) -> None:
    """What prefilling tells the proposer."""
    proposer.on_hidden_states(request, 0, decoder.rows_of([PROMPT]))
    proposer.begin(request)
