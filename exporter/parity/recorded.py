"""What parity runs on, and what it keeps of it in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ...runtime.graphs.values import caches_by_name
from ..common.memory import RecordedMemory
from ..families.common.base import Family
from ..families.common.reference import reference_inputs

KINDS = ("random", "realistic")
SEED, STREAMED_SEED = 11, 13
"""Of random numbers, and of `odd_picture`: 13 is the narrow one, of which tiles are few, as are logits of its rows."""

ROWS = 21  # tokens of text of a compared sequence: prefill 16, one token, then 4 at once


def compared_rows(max_length: int) -> int:
    """Rows of text of a compared sequence, in a bundle of `max_length`."""
    return max(7, min(ROWS, max_length - 1))


def compared_inputs(
    family: Family, length: int, *, streamed: bool
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(kind, arguments of the model's forward). Where the model is streamed, random tokens stand alone if it lets them:
    hundreds of embeddings of random pixels tell no more than those of the one picture, and cost a large model minutes."""
    seed = STREAMED_SEED if streamed else SEED
    for kind in KINDS:
        pictures = not streamed or family.needs_picture
        yield kind, reference_inputs(family, kind, seed, length, pictures=pictures)


@dataclass(frozen=True)
class RowCount:
    """Rows of one of the inputs, all of its sequences together: those that the decoder reads, and those that
    cross-attention sees (`encoded`: by way of a text encoder)."""

    decoded: int
    source: int = 0
    encoded: bool = False


def row_counts(family: Family, length: int, *, streamed: bool) -> list[RowCount]:
    """Of each of `compared_inputs`."""
    counts = []
    for _, inputs in compared_inputs(family, length, streamed=streamed):
        if not family.decoder.cross_attention:
            counts.append(RowCount(inputs["input_ids"].numel()))
            continue
        encoded = "input_ids" in inputs
        pictures = 0 if family.vision is None else family.vision.num_embeds or 0
        source = inputs["input_ids"].numel() if encoded else pictures
        counts.append(RowCount(inputs["decoder_input_ids"].numel(), source, encoded))
    return counts


def recorded_memory(family: Family, counts: Sequence[RowCount]) -> RecordedMemory:
    """Of caches and logits of each of `compared_inputs`."""
    shape = family.decoder
    cached = sum(
        heads * size
        for own in caches_by_name(shape, range(shape.num_layers)).values()
        for heads, size in own.values()
    )
    own = 4 * cached + 4 * family.language.embedding.shape[0]
    cross = 8 * shape.num_layers * shape.num_heads * shape.head_dim
    return RecordedMemory.of([count.decoded * own + count.source * cross for count in counts])
