"""Which pairs a ViSpec layer runs, and where (arXiv 2509.15235, section 3.1)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from vlmexport.runtime.drafts.eagle.vispec_pairs import Seen, pairs_of, slots_before


def seen(start: int, rows: int, tokens: int = 2) -> Seen:
    """A picture whose tokens and feature are told apart by its start."""
    return Seen(start, start + rows, np.arange(tokens)[:, None] + 100.0 * start, np.array([start + 0.5]))


def test_tokens_stand_at_the_last_positions_of_their_picture() -> None:
    pictures = [seen(2, 5), seen(9, 3, tokens=4)]
    found = pairs_of(pictures, 0, 14)
    assert [(pair.position, pair.compressed) for pair in found] == [
        (0, False), (4, True), (5, True), (6, False), (7, False), (8, True), (9, True), (10, True), (11, False),
        (12, False), (13, False),
    ]  # fmt: skip
    assert found[0].visual is None
    assert [pair.visual[0] for pair in found[1:] if pair.visual is not None] == [
        200.0, 201.0, 2.5, 2.5, 901.0, 902.0, 903.0, 9.5, 9.5, 9.5,
    ]  # fmt: skip


def test_a_picture_in_front_has_a_pair_less() -> None:
    found = pairs_of([seen(0, 4)], 0, 6)
    assert [(pair.position, pair.compressed) for pair in found] == [
        (1, True), (2, True), (3, False), (4, False), (5, False),
    ]  # fmt: skip
    assert pairs_of([seen(0, 1)], 0, 2) == pairs_of([seen(0, 1)], 0, 2)[:2]
    assert [pair.compressed for pair in pairs_of([seen(0, 1)], 0, 2)] == [False, False]


def test_pictures_side_by_side() -> None:
    found = pairs_of([seen(1, 3, 1), seen(4, 3, 1)], 0, 8)
    assert [(pair.position, pair.compressed) for pair in found] == [
        (2, True), (5, True), (6, False), (7, False),
    ]  # fmt: skip
    assert found[2].visual is not None and found[2].visual[0] == 4.5


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 7), st.integers(1, 5)), max_size=4), st.data())
def test_chunks_are_parts_of_the_whole(layout: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Wherever a prompt is cut into chunks; and so many slots lie before a place."""
    pictures, at = [], 0
    for gap, rows, tokens in layout:
        pictures.append(seen(at + gap, rows, tokens))
        at += gap + rows
    end = at + 3
    whole = pairs_of(pictures, 0, end)
    cuts = sorted(data.draw(st.lists(st.integers(0, end), max_size=3)))
    parts = [pairs_of(pictures, a, b) for a, b in zip([0, *cuts], [*cuts, end], strict=True)]
    keys = [
        (pair.position, pair.compressed, None if pair.visual is None else pair.visual[0]) for pair in whole
    ]
    assert [
        (pair.position, pair.compressed, None if pair.visual is None else pair.visual[0])
        for part in parts
        for pair in part
    ] == keys
    assert [key[0] for key in keys] == sorted({key[0] for key in keys})
    for place in range(end + 1):
        assert slots_before(pictures, place) == sum(pair.position < place for pair in whole)
