"""How a prompt is cut into passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..bundle.decoder_info import DecoderInfo
from ..common.errors import PromptError
from .forward_pass import PREFILL_STEP, PREFILL_WIDTH

Block = tuple[int, int]
"""[first, end) of the positions of a prompt that see each other in both directions."""


def widest_prefill(decoder: DecoderInfo, max_width: int) -> int:
    """Most positions of a prompt in a pass. With linear attention they, and `max_width` that are replayed, fit a window."""
    if decoder.linear_attention is None:
        return PREFILL_WIDTH
    room = decoder.linear_attention.window - max_width
    return min(PREFILL_WIDTH, max(max_width, room // PREFILL_STEP * PREFILL_STEP))


def prompt_chunks(first: int, end: int, most: int, blocks: Sequence[Block] = ()) -> Iterator[tuple[int, int]]:
    """[start, end) of every pass over the positions first..end − 1 of a prompt: at most `most` each, and none of
    `blocks`, which do not overlap, in part. Raises `PromptError` for a block that no pass holds."""
    assert not any(begin < first < stop for begin, stop in blocks), (
        "a cached part of a prompt ends within a block"
    )
    start = first
    while start < end:
        border = min(start + most, end)
        for begin, stop in blocks:
            if begin < border < stop:
                border = begin
        if border <= start:
            raise PromptError(
                f"the prompt has a part of which every position sees every other, that does not fit a pass of {most} "
                f"positions from {start} on"
            )
        yield start, border
        start = border


def blocks_within(blocks: Sequence[Block], start: int, end: int) -> list[Block]:
    """Those of `blocks` that lie in [start, end)."""
    return [(first, stop) for first, stop in blocks if start <= first and stop <= end]
