"""The masks that the runtime makes for a bundle's graphs."""

from __future__ import annotations

import numpy as np

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import RelativeBias
from ...runtime.decoder.masks import CausalMask
from ...runtime.engines.base import DTYPES


def bias_of(bundle: Bundle, info: RelativeBias | None) -> tuple[np.ndarray | None, int]:
    """(table of the bundle, its largest distance), as the runtime's masks take them."""
    return (None, 128) if info is None else (bundle.tensor(info.tensor), info.max_distance)


def masks_of(bundle: Bundle, cache_len: int) -> CausalMask:
    """The masks of the decoder over caches of `cache_len` tokens."""
    decoder = bundle.manifest.decoder
    bias = bias_of(bundle, decoder.relative_bias)
    return CausalMask(cache_len, decoder.mask_heads, DTYPES[decoder.mask_dtype], *bias)
