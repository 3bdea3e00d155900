"""Masks against their definition, slot by slot, and T5's buckets against transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vlmexport.runtime.common.bfloat16 import masked_value
from vlmexport.runtime.decoder.masks import CausalMask, encoder_mask, relative_position_bucket
from vlmexport.runtime.decoder.token_tree import TokenTree

CAPACITY = 40
HEADS = 3
TABLE = np.random.default_rng(1).standard_normal((8, HEADS)).astype(np.float32)


def naive(boolean: bool, start: int, tree: TokenTree, rows: int, window: int | None = None) -> np.ndarray:
    """[heads, nodes, rows] by the definition: position of a slot, visibility, bias of the distance. A window shows
    positions above the query's less itself, as transformers' `sliding_window_overlay`."""
    heads = 1 if boolean else HEADS
    out = np.full((heads, len(tree), rows), False if boolean else masked_value(np.dtype(np.float32)))
    for node in range(len(tree)):
        for slot in range(rows):
            inside = slot - start
            visible = slot < start or (inside < len(tree) and tree.ancestors[node, inside])
            if visible:
                key = slot if slot < start else start + tree.depths[inside]
                relative = key - (start + tree.depths[node])
                if window is not None and not key > start + tree.depths[node] - window:
                    continue
                bucket = relative_position_bucket(np.array(relative), 8, 20, bidirectional=False)
                out[:, node, slot] = True if boolean else TABLE[int(bucket)]
    return out


def fresh(boolean: bool, window: int | None = None) -> CausalMask:
    return (
        CausalMask(CAPACITY, 1, np.dtype(bool), window=window)
        if boolean
        else CausalMask(CAPACITY, HEADS, np.dtype(np.float32), TABLE, 20)
    )


@pytest.mark.parametrize("boolean", [True, False])
@given(start=st.integers(0, 20), width=st.integers(1, 8), spare=st.integers(0, 12))
def test_chain(boolean: bool, start: int, width: int, spare: int) -> None:
    rows = start + width + spare
    mask = fresh(boolean)
    out = np.empty((2, 1 if boolean else HEADS, width, rows), bool if boolean else np.float32)
    mask.chain(out, 1, start, width)
    expected = naive(boolean, start, TokenTree.chain(list(range(width))), rows)
    assert np.array_equal(out[1], expected.astype(out.dtype))


@pytest.mark.parametrize("boolean", [True, False])
@given(
    start=st.integers(0, 20), seed=st.integers(0, 10_000), count=st.integers(1, 9), padding=st.integers(0, 3)
)
def test_tree(boolean: bool, start: int, seed: int, count: int, padding: int) -> None:
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, count))]
    tree = TokenTree(list(range(count)), parents)
    rows = start + count + padding + 2
    out = np.empty((1, 1 if boolean else HEADS, count + padding, rows), bool if boolean else np.float32)
    fresh(boolean).tree(out, 0, start, tree)
    assert np.array_equal(out[0, :, :count], naive(boolean, start, tree, rows).astype(out.dtype))
    seen = out[0] if boolean else out[0] > masked_value(out.dtype) / 2
    assert seen.any(-1).all(), "an empty row would give NaN"


@given(
    start=st.integers(0, 20),
    seed=st.integers(0, 10_000),
    count=st.integers(1, 9),
    window=st.sampled_from([1, 2, 5, 8, 16, 50]),
)
def test_a_window_counts_positions(start: int, seed: int, count: int, window: int) -> None:
    """Chains, trees and single nodes of trees, before, across and behind the edge of the window."""
    rng = np.random.default_rng(seed)
    tree = TokenTree(list(range(count)), [-1, *(int(rng.integers(0, node)) for node in range(1, count))])
    rows, mask = start + count + 3, fresh(True, window)
    for nodes, fill in ((TokenTree.chain(tree.tokens), mask.chain), (tree, mask.tree)):
        out = np.ones((1, 1, count + 1, rows), bool)
        fill(out, 0, start, tree if nodes is tree else count + 1)
        assert np.array_equal(out[0, :, :count], naive(True, start, nodes, rows, window))
        assert out.any(-1).all(), "an empty row would give NaN"
    for node in range(count):
        out = np.ones((1, 1, 2, rows), bool)
        mask.node(out, 0, start, tree, node)
        assert np.array_equal(out[0], naive(True, start, tree, rows, window)[:, [node, node]])


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@given(start=st.integers(0, 12), lead=st.integers(0, 5), length=st.integers(1, 9), spare=st.integers(0, 4))
def test_a_block_sees_itself(window: int | None, start: int, lead: int, length: int, spare: int) -> None:
    """window AND (causal OR same block), as transformers' `create_masks_for_vision_model`."""
    first, width = start + lead, lead + length + spare
    out = np.empty((1, 1, width, start + width + 2), bool)
    mask = fresh(True, window)
    mask.chain(out, 0, start, width)
    mask.block(out, 0, start, first, first + length)
    query, key = start + np.arange(width)[:, None], np.arange(out.shape[3])
    inside = [(each >= first) & (each < first + length) for each in (query, key)]
    expected = (key <= query) | (inside[0] & inside[1])
    if window is not None:
        expected &= key > query - window
    assert np.array_equal(out[0, 0], expected)


def test_a_pass_holds_whole_blocks() -> None:
    out = np.zeros((1, 1, 4, 16), bool)
    for start, first, end in ((3, 2, 5), (3, 5, 8), (3, 4, 4)):
        with pytest.raises(AssertionError, match="whole blocks"):
            fresh(True).block(out, 0, start, first, end)


def test_chain_as_a_tree_has_the_same_mask() -> None:
    mask, chain = fresh(False), TokenTree.chain([1, 2, 3])
    one, other = np.empty((1, HEADS, 3, 32), np.float32), np.empty((1, HEADS, 3, 32), np.float32)
    mask.chain(one, 0, 7, 3)
    mask.tree(other, 0, 7, chain)
    assert np.array_equal(one, other)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_encoder_mask(lengths: list[int]) -> None:
    source = max(lengths)
    out = np.empty((len(lengths), HEADS, source, source), np.float32)
    encoder_mask(out, lengths, TABLE, 20)
    for row, length in enumerate(lengths):
        for query in range(source):
            for key in range(source):
                bucket = relative_position_bucket(np.array(key - query), 8, 20, bidirectional=True)
                expected = TABLE[int(bucket)] if key < length else masked_value(out.dtype)
                assert np.array_equal(out[row, :, query, key], np.broadcast_to(expected, HEADS))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (16, 40), (8, 20), (64, 1000)])
def test_buckets_equal_transformers(buckets: int, distance: int, bidirectional: bool) -> None:
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    relative = np.arange(-3000, 3000)
    theirs = t5.T5Attention._relative_position_bucket(
        torch.from_numpy(relative), bidirectional, buckets, distance
    )
    assert np.array_equal(
        relative_position_bucket(relative, buckets, distance, bidirectional), theirs.numpy()
    )
