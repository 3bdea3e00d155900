"""A toy in place of a model: the next token is a function of the whole prefix, so one wrong row, crop or commit changes
everything after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.speculative.cycle import Cycle
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speculative.sequence import Sequence as Request
from vlmexport.runtime.speculative.sequence import SequenceLimits
from vlmexport.runtime.speedup.stats import Stats

VOCABULARY = 11
PROMPT = (3, 1, 4)


def logits_of(prefix: Sequence[int]) -> np.ndarray:
    return np.random.default_rng([len(prefix), *prefix]).standard_normal(VOCABULARY).astype(np.float32)


class ToyRows:
    """What the toy says after the nodes of a pass."""

    def __init__(self, values: list[np.ndarray]) -> None:
        self._values = values

    def best(self, row: int) -> int:
        return int(self._values[row].argmax())

    def logits(self, row: int) -> np.ndarray:
        return self._values[row]

    def check(self, row: int) -> None:
        assert np.isfinite(self._values[row]).all()


class ToyDecoder:
    """`Decoder` whose caches are lists of tokens. Node rows of a pass are scratch until they are accepted."""

    widest_tree = 9
    exact_trees = True
    on_device = None

    def __init__(
        self, law: Callable[[Sequence[int]], np.ndarray] = logits_of, vocabulary: int = VOCABULARY
    ) -> None:
        """`law(prefix)`: logits float32 [vocabulary] of the token after it."""
        self.law, self.embedding = law, SimpleNamespace(vocabulary=vocabulary)
        self.engine = SimpleNamespace(busy=0.0)
        self.caches: list[list[int]] = []
        self.exit: list[tuple[int, ...]] = []
        self.passes: list[tuple[str, int]] = []
        self._trees: list[TokenTree] = []

    def add(self) -> int:
        self.caches.append(list(PROMPT))
        return len(self.caches) - 1

    def remove(self, row: int) -> None:
        self.caches[row] = self.caches[-1]
        self.caches.pop()

    @property
    def exit_count(self) -> int:
        return len(self.exit)

    def begin_cycle(self, width: int) -> None:
        assert 1 <= width <= self.widest_tree
        self.reserved, self.exit = width, []

    def trunk(self, cut: int, tokens: Sequence[int], trees: object = None) -> None:
        assert len(self.exit) < self.reserved and len(tokens) == len(self.caches)
        self.exit.append(tuple(tokens))
        self.passes.append(("trunk", 1))

    def tail(self, cut: int, count: int, trees: Sequence[TokenTree] | None = None) -> None:
        assert count == len(self.exit)
        chains = [TokenTree.chain([step[row] for step in self.exit]) for row in range(len(self.caches))]
        self._trees = chains if trees is None else list(trees)
        for chain, tree in zip(chains, self._trees, strict=True):
            assert chain.tokens[: len(tree)] == tree.tokens, "the tail sees what passed the trunk"
        self.passes.append(("tail", count))

    def full(self, *trees: TokenTree) -> None:
        assert max(map(len, trees)) <= self.reserved and len(trees) == len(self.caches)
        self._trees = list(trees)
        self.passes.append(("full", max(map(len, trees))))

    def head_of(self, trees: Sequence[TokenTree]) -> ToyRows:
        out = []
        for cache, tree in zip(self.caches, trees, strict=True):
            for node in range(len(tree)):
                path, up = [], node
                while up >= 0:
                    path.append(tree.tokens[up])
                    up = tree.parents[up]
                out.append(self.law([*cache, *reversed(path)]))
        return ToyRows(out)

    def accept_all(self, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]]) -> None:
        for cache, tree, path in zip(self.caches, trees, paths, strict=True):
            cache += [tree.tokens[0], *(tree.tokens[node] for node in path)]


def started(
    limits: SequenceLimits, proposer: Proposer | None = None, policy: Any = None, **options: Any
) -> Request:
    """A request after its prefill."""
    sampling = options.pop("sampling", Sampling())
    return Request(list(PROMPT), limits, Stats(), sampling, proposer, policy, **options)


def decode(cycle: Cycle, decoder: ToyDecoder, request: Request) -> Iterator[int]:
    """The tokens of one request, one by one."""
    decoder.add()
    cycle.join(request)
    rows: Any = ToyRows([decoder.law(PROMPT)])
    tokens: Any = request.emit([request.choose(rows, 0, [])])
    try:
        yield from tokens
        while request.finish_reason is None and not request.interrupted():
            tokens = request.emit(cycle.run()[0])
            yield from tokens
    finally:
        tokens.close()
        request.finish()
