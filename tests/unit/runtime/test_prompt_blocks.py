"""Parts of a prompt that see themselves in both directions: where passes end, and where a cached prompt may be gone on with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vlmexport.runtime.common.errors import PromptError
from vlmexport.runtime.decoder.prompt_chunks import blocks_within, prompt_chunks
from vlmexport.runtime.families.base import Prepared
from vlmexport.runtime.session.prefix_cache import align_to_spans, common_length, snapshot

Spans = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=5)
"""Gaps in front of blocks, and how long these are."""


def placed(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    blocks, end = [], 0
    for gap, length in spans:
        blocks.append((end + gap, end + gap + length))
        end = blocks[-1][1]
    return blocks


@given(spans=Spans, rest=st.integers(1, 30), most=st.integers(8, 20))
def test_no_pass_ends_within_a_block(spans: list[tuple[int, int]], rest: int, most: int) -> None:
    blocks = placed(spans)
    end = (blocks[-1][1] if blocks else 0) + rest
    chunks = list(prompt_chunks(0, end, most, blocks))
    assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])] and chunks[-1][1] == end
    assert all(0 < stop - start <= most for start, stop in chunks)
    assert not any(first < stop < last for _, stop in chunks for first, last in blocks)
    assert sorted(b for chunk in chunks for b in blocks_within(blocks, *chunk)) == blocks
    if not blocks:
        assert chunks == [(at, min(at + most, end)) for at in range(0, end, most)]


def test_a_block_across_the_end_of_a_pass_begins_the_next_one() -> None:
    assert list(prompt_chunks(0, 600, 256, [(250, 506)])) == [(0, 250), (250, 506), (506, 600)]
    assert list(prompt_chunks(250, 600, 256, [(250, 506)])) == [(250, 506), (506, 600)]


def test_a_block_that_no_pass_holds_is_refused() -> None:
    with pytest.raises(PromptError, match="does not fit a pass of 8"):
        list(prompt_chunks(0, 20, 8, [(2, 11)]))


def test_a_cached_part_ends_at_no_place_within_a_block() -> None:
    with pytest.raises(AssertionError, match="within a block"):
        list(prompt_chunks(5, 20, 16, [(2, 11)]))


def prepared(ids: list[int], *blocks: tuple[int, int]) -> Prepared:
    return Prepared(np.array(ids), blocks=blocks)


def test_a_cached_prompt_is_cut_between_blocks() -> None:
    cached = snapshot(prepared([1, 2, 3, 4, 5, 6], (1, 3)), [7, 8], 8)
    same = [1, 2, 3, 4, 5, 6, 7, 9]
    assert common_length(cached, prepared(same, (1, 3))) == 7
    assert common_length(cached, prepared(same)) == 1, "what was seen differs from place 1 on"
    assert common_length(cached, prepared(same, (1, 3), (4, 6))) == 4
    assert common_length(cached, prepared(same, (1, 3), (6, 8))) == 6
    assert common_length(cached, prepared([1, 2, 9, 4], (1, 3))) == 1, "a block in part is none"
    whole = snapshot(prepared([1, 2, 3], (0, 3)), [4], 4)
    assert common_length(whole, prepared([1, 2, 3, 4, 5], (0, 5))) == 0
    assert common_length(whole, prepared([1, 2, 3, 4, 5], (0, 3))) == 4


def test_the_nearest_place_between_blocks() -> None:
    found = prepared(list(range(20)), (2, 6), (6, 9), (15, 20))
    assert [align_to_spans(found, n) for n in (1, 2, 3, 5, 6, 8, 9, 14, 19)] == [1, 2, 2, 2, 6, 6, 9, 14, 15]
