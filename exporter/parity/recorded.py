"""What parity runs on, and what it keeps of it in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ..families.base import Family

SEED = 11
ROWS = 21  # rows of text of a compared sequence: prefill 16, one token, then 4 at once


def compared_rows(max_length: int) -> int:
    """Rows of text of a compared sequence, in a bundle of `max_length`."""
    return max(7, min(ROWS, max_length - 1))


def compared_inputs(
    family: Family, rows: int, *, streamed: bool
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """(kind, arguments of the model's forward). Where the model is streamed, random tokens stand alone if it lets them:
    hundreds of rows of random pixels tell no more than those of the one picture, and cost a large model minutes."""
    for kind in ("random", "realistic"):
        pictures = not streamed or family.needs_picture
        yield kind, family.reference_inputs(kind, SEED, rows, pictures=pictures)


def recorded_bytes(family: Family, rows: int, *, streamed: bool) -> int:
    """Memory of keys, values and logits: of every sequence in float32 and their errors, and of the longest in float64."""
    shape = family.decoder
    heads = shape.num_heads if shape.cross_attention else 0
    own = 8 * shape.num_layers * shape.num_kv_heads * shape.head_dim + 4 * family.language.embedding.shape[0]
    cross = 8 * shape.num_layers * heads * shape.head_dim
    found = []
    for _, inputs in compared_inputs(family, rows, streamed=streamed):
        source = inputs["input_ids"].numel() if "input_ids" in inputs else _picture_rows(family)
        found.append(_decoded(family, inputs) * own + source * cross)
    return 2 * sum(found) + 2 * max(found)


def decoded_rows(family: Family, rows: int, *, streamed: bool) -> list[int]:
    """Rows that the decoder reads of each of the inputs; of one that crosses, those of its source as well."""
    return [
        _decoded(family, inputs)
        + (inputs["input_ids"].numel() if family.decoder.cross_attention and "input_ids" in inputs else 0)
        for _, inputs in compared_inputs(family, rows, streamed=streamed)
    ]


def _decoded(family: Family, inputs: Mapping[str, torch.Tensor]) -> int:
    return inputs["decoder_input_ids" if family.decoder.cross_attention else "input_ids"].numel()


def _picture_rows(family: Family) -> int:
    return (family.vision.rows or 0) if family.vision is not None else 0
