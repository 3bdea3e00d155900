"""What the cache holds of a request that has ended, and how much of it the next one begins with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..decoder.positions import next_position
from ..decoder.prompt_chunks import Block
from ..families.base import Prepared, View

if TYPE_CHECKING:
    from ..speculative.proposer import Proposer


@dataclass(frozen=True)
class Prefix:
    """Cached slots: token ids int64 [n], their positions int64 [axes, n] (None: they count from 0), the digests of the
    pictures among them by the places where their embeddings begin, and the prompt's blocks. Pixels are let go."""

    ids: np.ndarray
    positions: np.ndarray | None = None
    digests: tuple[tuple[int, bytes], ...] = ()
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class CachedRequest:
    """What the last request left in the cache, and which draft has seen it. `encoded`: the prompt is an encoder's, and only
    what cross-attention reads of it is kept."""

    prefix: Prefix
    proposer: Proposer | None
    encoded: bool = False

    def resume(self, prepared: Prepared, proposer: Proposer | None, least: int = 0) -> int:
        """How many cached positions, `least` or none, `prepared` goes on behind, with this draft: one that reads the prompt's hidden states
        must have seen them too, with the token behind the last one. Of an encoder's prompt all or none."""
        if self.encoded:
            return len(prepared.token_ids) if same_prompt(self.prefix, prepared) else 0
        cached_len = common_length(self.prefix, prepared)
        if cached_len < least:
            return 0
        if proposer is None or proposer.resumable == sys.maxsize:
            return cached_len
        if proposer is not self.proposer:
            return 0
        cached_len = align_to_spans(prepared, min(cached_len - 1, proposer.resumable))
        if cached_len < least:
            return 0
        if cached_len > 0:
            proposer.resume(cached_len)
        return max(0, cached_len)


def snapshot(prepared: Prepared, tokens: Sequence[int], length: int) -> Prefix:
    """The first `length` slots of a prompt and of what was generated behind it."""
    ids = np.concatenate([prepared.token_ids, np.asarray(tokens, np.int64)])[:length]
    positions = prepared.positions
    if positions is not None:
        behind = next_position(positions) + np.arange(max(0, length - positions.shape[1]))
        behind = np.broadcast_to(behind, (len(positions), len(behind)))
        positions = np.concatenate([positions, behind], axis=1)[:, :length]
    return Prefix(ids, positions, _digests(prepared), prepared.blocks)


def common_length(prefix: Prefix, prepared: Prepared) -> int:
    """How many tokens at the beginning of `prepared` are those of `prefix`: same ids, positions, pictures and blocks, no
    picture and no block in part. At least one token is left, whose logits give the first token."""
    ids = prepared.token_ids
    count = min(len(prefix.ids), len(ids) - 1)
    count = _run(prefix.ids[:count] == ids[:count])
    here, there = _counting(prefix.positions, count), _counting(prepared.positions, count)
    if len(here) != len(there):
        here, there = (np.broadcast_to(each, (max(len(here), len(there)), count)) for each in (here, there))
    count = _run((here == there).all(0))
    count = min([count, *(first for first, _ in {*prefix.blocks} ^ {*prepared.blocks})])
    known = dict(prefix.digests)
    for start, end, view in _placed(prepared):
        if start >= count:
            break
        same = end <= count and known.get(start) == view.digest
        if not same:
            count = start
            break
    return align_to_spans(prepared, count)


def same_prompt(prefix: Prefix, prepared: Prepared) -> bool:
    """Whether all ids and pictures of `prepared` are those of `prefix`: an encoder then gives the same."""
    return np.array_equal(prefix.ids, prepared.token_ids) and prefix.digests == _digests(prepared)


def align_to_spans(prepared: Prepared, count: int) -> int:
    """At most `count` first tokens of `prepared`, without a picture or a block in part."""
    spans = [(start, end) for start, end, _ in _placed(prepared)]
    for start, end in sorted([*spans, *prepared.blocks], reverse=True):
        if start < count < end:
            count = start
    return count


def _placed(prepared: Prepared) -> tuple[tuple[int, int, View], ...]:
    """(place of its first embedding, that behind its last one, picture) of each; text may stand between the two."""
    positions = prepared.image_positions
    if positions is None:
        return ()
    ends = np.cumsum([view.num_embeds for view in prepared.views])
    return tuple(
        (int(positions[end - view.num_embeds]), int(positions[end - 1]) + 1, view)
        for end, view in zip(ends, prepared.views, strict=True)
    )


def _digests(prepared: Prepared) -> tuple[tuple[int, bytes], ...]:
    return tuple((start, view.digest) for start, _, view in _placed(prepared))


def _run(equal: np.ndarray) -> int:
    """How many of the first are true."""
    return len(equal) if equal.all() else int(np.argmin(equal))


def _counting(positions: np.ndarray | None, count: int) -> np.ndarray:
    return np.arange(count)[None] if positions is None else positions[:, :count]
