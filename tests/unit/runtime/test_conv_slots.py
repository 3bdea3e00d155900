"""Which cached rows a causal convolution reads, in chains and in trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.runtime.bundle.checks import _check_caches
from vlmexport.runtime.bundle.decoder_info import DecoderInfo
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.decoder.conv_slots import ConvSlots
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.graphs.decoding import layers_interface
from vlmexport.runtime.graphs.values import caches, layer_caches, segment_positions

CAPACITY = 64


@st.composite
def trees(draw: Any) -> TokenTree:
    """Any shape of at most 9 nodes."""
    count = draw(st.integers(1, 9))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, count))]
    return TokenTree(list(range(count)), parents)


def way(tree: TokenTree, node: int, start: int) -> list[int]:
    """Slots of the tokens before a node on its way, the nearest last, by walking up."""
    slots = []
    while (node := tree.parents[node]) >= 0:
        slots.append(start + node)
    return [*range(start), *reversed(slots)]


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(0, 12), st.integers(2, 5), st.integers(0, 3))
def test_a_node_reads_its_ancestors_rows(tree: TokenTree, start: int, kernel: int, padding: int) -> None:
    slots, width = ConvSlots(CAPACITY, kernel), len(tree) + padding
    out = np.full((2, width, kernel - 1), 99)
    slots.tree(out, 1, start, tree)
    assert (out[0] == 99).all()
    for row in range(width):
        node = row if row < len(tree) else 0  # padding reads what the root reads
        expected = ([-1] * kernel + way(tree, node, start))[1 - kernel :]
        assert out[1, row].tolist() == expected
        slots.node(out, 0, start, tree, node)
        assert (out[0] == expected).all()


def test_a_chain_reads_the_slots_before_it() -> None:
    slots, out = ConvSlots(CAPACITY, 4), np.empty((1, 3, 3), np.int64)
    slots.chain(out, 0, 1, 3)
    assert out[0].tolist() == [[-1, -1, 0], [-1, 0, 1], [0, 1, 2]]
    seen = slots.seen(3, CAPACITY)
    for start in (0, 1, 2, 40):
        slots.chain(out, 0, start, 3)
        tree = np.empty_like(out)
        slots.tree(tree, 0, start, TokenTree.chain([5, 6, 7]))
        assert np.array_equal(out[0], seen[start]) and np.array_equal(out, tree)


def decoder(**changes: Any) -> DecoderInfo:
    """Convolutions, attention, and two segments."""
    fields = {
        "num_layers": 4, "hidden_size": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "position": "rotary",
        "mask_dtype": "bool", "mask_heads": 1, "cross_attention": False, "cuts": [0, 2, 4],
        "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_kernel": 3,
        "layer_caches": {"conv": [{"name": "conv_cache", "num_heads": 1, "head_dim": 12}]},
    }  # fmt: skip
    return DecoderInfo.parse(fields | changes, "decoder")


def test_a_layer_has_the_caches_of_its_kind() -> None:
    info = decoder()
    manifest: Any = SimpleNamespace(decoder=info, cache_dtype="float16", compute_dtype="float32")
    assert layer_caches(info, 0) == {"conv_cache": (1, 12)}
    assert layer_caches(info, 2) == {"key_cache": (2, 3), "value_cache": (2, 3)}
    assert caches(manifest, range(1, 3)) == {
        "conv_cache.1": ("float16", ("batch", 1, "cache", 12)),
        "key_cache.2": ("float16", ("batch", 2, "cache", 3)),
        "value_cache.2": ("float16", ("batch", 2, "cache", 3)),
    }
    first, _ = layers_interface(manifest, range(2), range(2))
    second, outputs = layers_interface(manifest, range(2, 4), range(2, 4))
    assert [*first] == ["hidden", "write_indices", "conv_slots", "conv_cache.0", "conv_cache.1"]
    assert first["conv_slots"] == ("int64", ("batch", "width", 2))
    assert {"attn_mask", "conv_slots", "positions", "key_cache.2", "conv_cache.3"} <= second.keys()
    assert "updated_conv_cache.3" in outputs
    assert segment_positions(info, 0, [0, 1]) is None and segment_positions(info, 0, [1, 2]) is not None


def test_a_manifest_without_convolutions_says_nothing_of_them() -> None:
    plain = decoder(layer_types=None, layer_caches=None, conv_kernel=None)
    assert not {"layer_caches", "conv_kernel"} & plain.to_dict().keys()
    assert "layer_types" in plain.to_dict()
    written = decoder().to_dict()
    assert written["layer_caches"] == {"conv": [{"name": "conv_cache", "num_heads": 1, "head_dim": 12}]}
    assert DecoderInfo.parse(written, "decoder") == decoder()


ROWS = {"name": "conv_cache", "num_heads": 1, "head_dim": 12}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_caches": None, "conv_kernel": None}, "decoder.layer_caches.*caches of conv layers"),
        ({"conv_kernel": None}, "decoder.conv_kernel"),
        ({"layer_types": None}, "decoder.layer_caches"),
        ({"layer_caches": {"conv": [ROWS | {"name": "gate_cache"}]}}, "decoder.layer_caches.conv"),
        ({"layer_caches": {"conv": [ROWS, ROWS]}}, "each once"),
        ({"layer_caches": {"conv": [ROWS, ROWS | {"name": "key_cache"}]}}, "decoder.layer_caches.conv"),
        ({"layer_caches": {"conv": [ROWS, ROWS | {"name": "a.b_cache"}]}}, "decoder.layer_caches.conv"),
        ({"layer_caches": {"conv": [ROWS], "full_attention": [ROWS]}}, "no attention"),
        ({"layer_types": ["conv"] * 4}, "at least one kind with attention"),
        ({"mask_dtype": "float32"}, "float mask"),
    ],
)
def test_caches_must_follow_from_the_kinds_of_layers(changes: dict[str, Any], message: str) -> None:
    _check_caches(decoder())
    with pytest.raises(BundleError, match=message):
        _check_caches(decoder(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"conv_kernel": 1}, {"layer_caches": {"mamba": [ROWS]}}, {"layer_caches": {"conv": [{"name": "x"}]}}],
)
def test_fields_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(BundleError, match=r"decoder\."):
        decoder(**changes)
