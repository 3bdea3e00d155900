"""From which width on this machine's kernels give a row the same bits: what passes of a quantized target are padded to.

Kernels of few rows add in another order than those of many. With integer weights the rows of a product are rounded to 8
bits, which makes whole steps of such a difference, so that the best token changes where it was not close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .kv_cache import BUCKET
from .token_tree import TokenTree

if TYPE_CHECKING:
    from .decoder import Decoder

WIDTHS = (1, 2, 3, 4, 8)
"""That are compared with the widest pass."""

SEED = 47
CACHED = 90
"""Slots of a prompt: with the widest pass they are fewer than `BUCKET`, so that a longer bound cache can be compared."""

SOURCE = 24
"""Rows that a model with cross-attention looks at."""

Rows = list[tuple[np.ndarray, np.ndarray]]
"""By sequence: hidden states [width, E] after the last segment, and logits [width, V]."""


def probe_least_width(decoder: Decoder) -> int | None:
    """The smallest width from which all tried ones give every row of a pass the bits that the widest gives it; None where
    only `max_width` does.

    All segments and the head run over random tokens behind random prompts, with a short and a longer bound cache, and, where
    the decoder takes several sequences, with two and with all of them: each must get what it gets alone. Nothing may be
    cached; nothing is afterwards.
    """
    before, decoder.passes.least_width = decoder.passes.least_width, 1
    try:
        widest = decoder.max_width
        widths = sorted({*(width for width in WIDTHS if width < widest), widest})
        expected: Rows = []
        for number in range(decoder.arena.max_batch):
            (rows,) = _rows(decoder, [number], [widest])
            if rows is None:
                return None
            expected += rows
        batches = sorted({1, min(2, len(expected)), len(expected)})
        tried = [_rows(decoder, range(batch), widths) for batch in batches]
        least = None
        for place in reversed(range(len(widths))):
            if not all(_equal(found[place], expected, widths[place]) for found in tried):
                break
            least = widths[place]
        return least if least != widest or widest == 1 else None
    finally:
        decoder.passes.least_width = before
        decoder.reset()


def _rows(decoder: Decoder, sequences: Sequence[int], widths: Sequence[int]) -> list[Rows | None]:
    """Of each width: the rows of these sequences, decoded together; None where they depend on how long the bound cache
    is."""
    nodes = [_begin(decoder, place, number, len(sequences)) for place, number in enumerate(sequences)]
    short = [_pass(decoder, [tokens[:width] for tokens in nodes]) for width in widths]
    room = decoder.arena.capacity - decoder.arena.length
    decoder.reserve(min(BUCKET, room))
    long = [_pass(decoder, [tokens[:width] for tokens in nodes]) for width in widths]
    return [
        rows if _equal(rows, others, width) else None
        for rows, others, width in zip(short, long, widths, strict=True)
    ]


def _begin(decoder: Decoder, place: int, number: int, batch: int) -> list[int]:
    """Prefill the random prompt of this number as the sequence in `place`; the tokens of its passes."""
    rng = np.random.default_rng(SEED + number)
    if not place:
        decoder.reset(batch)
    words, widest = decoder.manifest.text.vocab_size, decoder.max_width
    if decoder.encoder is not None:
        limits = decoder.manifest.limits
        count = min(SOURCE, limits.max_source or limits.max_length)
        decoder.encode(place, decoder.embed(rng.integers(0, words, count)))
    count = max(1, min(CACHED - number % 8, decoder.max_length - 1))
    hidden_states = decoder.embedding.embeddings(rng.integers(0, words, count))
    decoder.prefill(hidden_states, place)
    return rng.integers(0, words, widest).tolist()


def _pass(decoder: Decoder, tokens: Sequence[Sequence[int]]) -> Rows:
    """All segments and the head over a chain of every sequence, as decoding runs them."""
    width = len(tokens[0])
    trees = [TokenTree.chain(list(chain)) for chain in tokens]
    decoder.begin_cycle(width)
    decoder.full(*trees)
    hidden = [
        np.array(decoder.engine.read(decoder.verified_hidden(place, width))[0], np.float32)
        for place in range(len(trees))
    ]
    logits = decoder.head_of(trees)
    return [
        (rows, np.stack([np.array(logits.logits(place * width + node)) for node in range(width)]))
        for place, rows in enumerate(hidden)
    ]


def _equal(found: Rows | None, expected: Rows, width: int) -> bool:
    """Whether the first `width` rows of every sequence have the same bits."""
    return found is not None and all(
        np.array_equal(ours, theirs[:width])
        for pair, other in zip(found, expected, strict=False)
        for ours, theirs in zip(pair, other, strict=True)
    )
