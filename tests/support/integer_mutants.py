"""Errors of decoding with integer weights, and the guards that must notice them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.embedding import Embedding
from vlmexport.runtime.decoder.forward_passes import ForwardPasses
from vlmexport.runtime.decoder.masks import CausalMask

from tests.support import lossless
from tests.support.plain_decoding import PlainDecoding
from tests.support.rig import FLOAT_WEIGHTS, Rig

Patch = pytest.MonkeyPatch


@functools.cache
def drafted(draft: str, *lengths: int, column: str = "narrow-rounding") -> Callable[[Callable, str], None]:
    """Drafted against plain decoding on an engine whose numbers differ in narrow passes. Both have the planted error, so
    that neither is kept."""

    def guard(rigs: Callable, family: str) -> None:
        floats = rigs(family, FLOAT_WEIGHTS)
        plain = PlainDecoding(Rig(floats.tiny, column, floats.oracle, max_batch=1))
        lossless.greedy(Rig(floats.tiny, column, plain), draft, (41,), lengths, (24,))

    return guard


def as_generate(rigs: Callable, family: str) -> None:
    """Plain decoding with the integers as floats against transformers."""
    rig = rigs(family, FLOAT_WEIGHTS)
    request = rig.request(41)
    tokens = lossless.generate(rig, request, 24).tokens
    assert tokens == rig.oracle.greedy(request, 24)


def no_least_width(patch: Patch) -> None:
    """Passes are as narrow as what they verify."""
    patch.setattr(Decoder, "set_least_width", lambda self, width: None)


def padding_kept(patch: Patch) -> None:
    """Rows that pad a pass up stay in the cache."""
    accept, accept_all = Decoder.accept, Decoder.accept_all

    def wrong(self: Any, tree: Any, path: Any, row: int = 0) -> None:
        accept(self, tree, path, row)
        self.arena.lengths[row] += max(0, self.passes.least_width - len(tree))

    def wrong_all(self: Any, trees: Any, paths: Any) -> None:
        accept_all(self, trees, paths)
        for row, tree in enumerate(trees):
            self.arena.lengths[row] += max(0, self.passes.least_width - len(tree))

    patch.setattr(Decoder, "accept", wrong)
    patch.setattr(Decoder, "accept_all", wrong_all)


def padding_seen(patch: Patch) -> None:
    """The last node of a padded chain sees the rows behind it."""
    full, chain = Decoder.full, CausalMask.chain
    nodes: list[int] = []

    def marked(self: Any, *trees: Any) -> None:
        nodes.append(max(map(len, trees)))
        try:
            full(self, *trees)
        finally:
            nodes.pop()

    def wrong(self: Any, out: np.ndarray, row: int, start: int, width: int) -> None:
        chain(self, out, row, start, width)
        if nodes and nodes[-1] < width:
            out[row, :, : nodes[-1], start + nodes[-1] : start + width] = out[row, :, :1, start : start + 1]

    patch.setattr(Decoder, "full", marked)
    patch.setattr(CausalMask, "chain", wrong)
    patch.setattr(ForwardPasses, "_chain_step", lambda self, forward_pass: None)  # it keeps masks of its own


def trees_of_integers(patch: Patch) -> None:
    """A target with integer weights verifies trees, whose nodes lie in other slots than in plain decoding."""
    patch.setattr(Manifest, "exact_trees", True)


def scales_of_the_neighbour(patch: Patch) -> None:
    """Rows of a tied table are read with the scales of the block beside theirs, by host and graph alike."""
    init = Embedding.__init__

    def wrong(self: Any, engine: Any, tensors: Any, *args: Any) -> None:
        scales = np.roll(tensors["embedding_scales"], 1, axis=0)
        init(self, engine, {**tensors, "embedding_scales": scales}, *args)

    patch.setattr(Embedding, "__init__", wrong)


def integers_of_the_neighbour(patch: Patch) -> None:
    """Rows of a tied table take the integers of the block beside theirs."""
    init = Embedding.__init__

    def wrong(self: Any, engine: Any, tensors: Any, *args: Any) -> None:
        integers = tensors["embedding_table"]
        blocks = len(integers) // len(tensors["embedding_scales"])
        init(self, engine, {**tensors, "embedding_table": np.roll(integers, blocks, axis=0)}, *args)

    patch.setattr(Embedding, "__init__", wrong)
