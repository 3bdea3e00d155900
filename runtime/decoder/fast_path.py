"""A pass over a chain of one sequence, on an engine in host memory: everything that it looks up is looked up once.

Plain decoding of a small model is a hundred such passes a second and more, drafting six times as many: what
`ForwardPasses` does in general (trees, batches, devices) is here done for the one case, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .embedding import Embedding
from .encoder import Encoder
from .forward_pass import ChainStep, ForwardPass


def embedding_writer(out: np.ndarray, embedding: Embedding) -> Callable[[Sequence[int]], None]:
    """Writes the embeddings of `tokens` [n] into `out` [n, E]; for an embedding that is a plain look-up."""
    table = embedding.table
    if table is None or len(out) > 1:
        return lambda tokens: embedding.fill(out, tokens)
    only = out[0]

    def write(tokens: Sequence[int]) -> None:
        only[...] = table[tokens[0]]

    return write


def chain_step(
    forward_pass: ForwardPass,
    masks: Sequence[tuple[np.ndarray, Mapping[int, np.ndarray]]],
    encoder: Encoder | None,
    fill: Callable[[Sequence[int]], None] | None,
    positions: Callable[[int], None] | None,
    states: Callable[[int], None] | None,
) -> ChainStep:
    """The step of a prepared pass over one sequence. `masks`: arrays of what the pass reads, and what each is for a chain by
    its start; `fill` writes the embeddings of tokens, `positions` the positions
    from a slot on and `states` what is replayed before it, where the pass takes them."""
    indices, width = forward_pass.indices, forward_pass.width
    calls = [call.run for call in forward_pass.calls]

    def step(tokens: Sequence[int] | None, start: int) -> None:
        if encoder is not None and forward_pass.encoder_version != encoder.version:
            forward_pass.encoder_version = encoder.write_mask(width, forward_pass.batch_index, 1)
        if tokens is not None:
            fill(tokens)  # type: ignore[misc]
        indices[0] = start
        for own, seen in masks:
            own[...] = seen[start]
        if positions is not None:
            positions(start)
        if states is not None:
            states(start)
        for call in calls:
            call()

    return step
