"""A block that sees all of itself where layers have a window, against transformers' mask of a prefix."""

from __future__ import annotations

import numpy as np
import pytest
from vlmexport.runtime.decoder.masks import CausalMask


@pytest.mark.parametrize("window", [None, 1, 3, 5, 50])
@pytest.mark.parametrize("prefix", [1, 4, 9])
def test_a_prefix_sees_itself_whatever_the_window(prefix: int, window: int | None) -> None:
    """(window and causal) or prefix, as `PaliGemmaModel.forward` composes it; Gemma 3's is window and (causal or block)."""
    count, capacity = 12, 16
    out = np.empty((1, 1, count, capacity), bool)
    found = {}
    for whole in (True, False):
        mask = CausalMask(capacity, 1, np.dtype(bool), window=window, whole_blocks=whole)
        mask.chain(out, 0, 0, count)
        mask.block(out, 0, 0, 0, prefix)
        found[whole] = out[0, 0].copy()
    query, key = np.ogrid[:count, :capacity]
    near = query - key < (window or capacity)
    inside = (query < prefix) & (key < prefix)
    assert np.array_equal(found[True], ((key <= query) & near) | inside)
    assert np.array_equal(found[False], near & ((key <= query) | inside))
