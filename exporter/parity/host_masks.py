"""The masks that the runtime makes for a bundle's graphs."""

from __future__ import annotations

import numpy as np

from ...runtime.bundle.decoder_info import RelativeBias
from ...runtime.bundle.folder import Bundle
from ...runtime.decoder.masks import CausalMask
from ...runtime.engines.base import DTYPES
from ...runtime.graphs.values import MASKS, attention_masks


def bias_of(bundle: Bundle, info: RelativeBias | None) -> tuple[np.ndarray | None, int]:
    """(table of the bundle, its largest distance), as the runtime's masks take them."""
    return (None, 128) if info is None else (bundle.tensor(info.tensor), info.max_distance)


def masks_of(bundle: Bundle, cache_len: int) -> dict[str, CausalMask]:
    """The masks of the decoder over caches of `cache_len` tokens, by the graphs' input."""
    decoder = bundle.manifest.decoder
    bias = bias_of(bundle, decoder.relative_bias)
    windows = {MASKS["sliding_attention"]: decoder.sliding_window}
    return {
        name: CausalMask(
            cache_len, decoder.mask_heads, DTYPES[decoder.mask_dtype], *bias, window=windows.get(name)
        )
        for name in attention_masks(decoder, range(decoder.num_layers))
    }
