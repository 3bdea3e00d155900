"""The masks that the runtime makes for a bundle's graphs, and the slots of convolutions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...runtime.bundle.decoder_info import RelativeBias
from ...runtime.bundle.folder import Bundle
from ...runtime.decoder.conv_slots import ConvSlots
from ...runtime.decoder.masks import CausalMask
from ...runtime.engines.base import DTYPES
from ...runtime.graphs.role import Shape
from ...runtime.graphs.values import MASKS, attention_masks, slots_read


def bias_of(bundle: Bundle, info: RelativeBias | None) -> tuple[np.ndarray | None, int]:
    """(table of the bundle, its largest distance), as the runtime's masks take them."""
    return (None, 128) if info is None else (bundle.tensor(info.tensor), info.max_distance)


@dataclass(frozen=True)
class HostInput:
    """What the runtime writes for one input: a mask, or the slots of convolutions."""

    written: CausalMask | ConvSlots
    dtype: np.dtype
    shape: Shape
    """Symbolic, of `batch`, `width` and `cache`."""

    def empty(self, **sizes: int) -> np.ndarray:
        """Room for it, of symbolic dimensions of these sizes."""
        return np.empty([sizes[size] if isinstance(size, str) else size for size in self.shape], self.dtype)


def slot_inputs_of(bundle: Bundle, cache_len: int) -> dict[str, HostInput]:
    """What says which slots the decoder's layers read, in caches of `cache_len` tokens, by the graphs' input."""
    decoder, masks = bundle.manifest.decoder, masks_of(bundle, cache_len)
    found = {}
    for name, (dtype, shape) in slots_read(decoder, range(decoder.num_layers)).items():
        written = masks.get(name) or ConvSlots(cache_len, (decoder.conv_kernel or 0))
        found[name] = HostInput(written, DTYPES[dtype], shape)
    return found


def masks_of(bundle: Bundle, cache_len: int) -> dict[str, CausalMask]:
    """The masks of the decoder over caches of `cache_len` tokens, by the graphs' input."""
    decoder = bundle.manifest.decoder
    bias = bias_of(bundle, decoder.relative_bias)
    windows = {MASKS["sliding_attention"]: decoder.sliding_window}
    whole = bool(decoder.whole_blocks)
    return {
        name: CausalMask(
            cache_len,
            decoder.mask_heads,
            DTYPES[decoder.mask_dtype],
            *bias,
            windows.get(name),
            whole_blocks=whole,
        )
        for name in attention_masks(decoder, range(decoder.num_layers))
    }
