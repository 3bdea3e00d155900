"""Inputs and outputs that several graphs have: hidden states, caches, and what says where tokens stand and what they
see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from .role import Shape, Values

if TYPE_CHECKING:
    from ..bundle.decoder_info import DecoderInfo
    from ..bundle.draft_options import DraftCache
    from ..bundle.manifest import Manifest


def hidden_states(manifest: Manifest) -> tuple[str, Shape]:
    """Rows of a pass, [batch, width, E]."""
    return manifest.compute_dtype, ("batch", "width", manifest.decoder.hidden_size)


EMBEDDING = ("embedding_table", "embedding_scales")
"""Tensors of a manifest that embeddings are read from: the table [V, E], or where it is the LM head as well and consists of
integers, [E, V] with scales [E / block, V]."""


def embedding_tensors(manifest: Manifest) -> Values:
    """The tensors of `EMBEDDING` that a bundle has, as they are stored."""
    tensors = {name: manifest.tensors[name] for name in EMBEDDING if name in manifest.tensors}
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def vocabulary(manifest: Manifest) -> int:
    """Rows of the embedding table, which a model may have rounded up beyond its tokenizer's words."""
    shape = manifest.tensors["embedding_table"].shape
    return shape[1] if "embedding_scales" in manifest.tensors else shape[0]


def positions_shape(position: str, first_layer: int) -> Shape | None:
    """Shape of a segment's input `positions` (int64), or None where it takes none.

    Rotary angles are computed in every segment, from one position per token or, with M-RoPE, from three; a table of
    learned positions is added to the hidden states once, by the segment that starts at layer 0.
    """
    if position == "rotary" or (position == "learned" and first_layer == 0):
        return ("batch", "width")
    return (3, "batch", "width") if position == "mrope" else None


def deepstack_inputs(deepstack_layers: int | None, layers: Iterable[int]) -> list[str]:
    """Inputs [batch, width, E] of a graph over `layers`, one for each of the decoder's first `deepstack_layers`: what is added
    to the hidden states behind that layer where a picture's embeddings are (DeepStack, arXiv 2406.04334), else zero."""
    return [f"deepstack.{layer}" for layer in layers if layer < (deepstack_layers or 0)]


def image_width(decoder: DecoderInfo) -> int:
    """Numbers of an embedding that `vision` gives: E that enter the first layer, then E for each of `deepstack_layers`."""
    return decoder.hidden_size * (1 + (decoder.deepstack_layers or 0))


FULL, SLIDING, CONV, LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"
MASKS = {FULL: "attn_mask", SLIDING: "sliding_mask"}
"""Kind of a layer → the mask that its attention reads: of everything before a token, or of a window that ends with it."""

LAYER_TYPES = (*MASKS, CONV, LINEAR)
"""Kinds of layers, as transformers names them."""


def kind_of_layer(layer_types: Sequence[str] | None, layer: int) -> str:
    """Without `layer_types` every layer sees everything before a token."""
    return FULL if layer_types is None else layer_types[layer]


def mask_of_layer(layer_types: Sequence[str] | None, layer: int) -> str | None:
    """The mask that a layer reads; None: it is no attention."""
    return MASKS.get(kind_of_layer(layer_types, layer))


def attention_masks(decoder: DecoderInfo, layers: Iterable[int]) -> Values:
    """The masks [batch, heads, width, cache] that the attention of some layers of the target reads."""
    read = {mask_of_layer(decoder.layer_types, layer) for layer in layers}
    value = decoder.mask_dtype, ("batch", decoder.mask_heads, "width", "cache")
    return {name: value for name in MASKS.values() if name in read}


KEY_VALUE = ("key_cache", "value_cache")
"""The caches of a layer with attention."""

CONV_CACHE, CONV_SLOTS = "conv_cache", "conv_slots"
"""The cache of a layer with a causal convolution, and the input that says which of its rows a token reads."""


class CachedLayers(Protocol):
    """What `layer_caches` reads of a decoder: a manifest's, or the shape that a family says."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def layer_types(self) -> Sequence[str] | None: ...
    @property
    def layer_caches(self) -> Mapping[str, Sequence[CachedRows]] | None: ...


class CachedRows(Protocol):
    """One cache of a kind of layer: a row [num_heads, head_dim] for every slot."""

    @property
    def name(self) -> str: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def layer_caches(decoder: CachedLayers, layer: int) -> dict[str, tuple[int, int]]:
    """The caches of a layer by name, with the heads and the size of a row.

    A row belongs to a slot, whatever it holds: a pass writes it, a shorter length forgets it, `commit` moves it.
    """
    kind = kind_of_layer(decoder.layer_types, layer)
    if kind == LINEAR:
        return {}  # it keeps a state (`states.py`)
    own = (decoder.layer_caches or {}).get(kind)
    if own is None:
        return dict.fromkeys(KEY_VALUE, (decoder.num_kv_heads, decoder.head_dim))
    return {cache.name: (cache.num_heads, cache.head_dim) for cache in own}


def caches_by_name(decoder: CachedLayers, layers: Iterable[int]) -> dict[str, dict[int, tuple[int, int]]]:
    """The caches of some layers: name → layer → (heads, size)."""
    found: dict[str, dict[int, tuple[int, int]]] = {}
    for layer in layers:
        for name, shape in layer_caches(decoder, layer).items():
            found.setdefault(name, {})[layer] = shape
    return found


def caches(manifest: Manifest, layers: Iterable[int], prefix: str = "") -> Values:
    """The caches of layers of the target."""
    return {
        f"{prefix}{name}.{layer}": (manifest.cache_dtype, ("batch", heads, "cache", size))
        for name, by_layer in caches_by_name(manifest.decoder, layers).items()
        for layer, (heads, size) in by_layer.items()
    }


def conv_slots(decoder: DecoderInfo, layers: Iterable[int]) -> Values:
    """`conv_slots` int64 [batch, width, kernel − 1] where some of the layers have a causal convolution: the slots of the
    tokens before each token on its way, the nearest last; −1 where the sequence had not begun."""
    if not any(CONV_CACHE in layer_caches(decoder, layer) for layer in layers):
        return {}
    assert decoder.conv_kernel is not None, "checked with the manifest"
    return {CONV_SLOTS: ("int64", ("batch", "width", decoder.conv_kernel - 1))}


def slots_read(decoder: DecoderInfo, layers: Iterable[int]) -> Values:
    """What says which slots some layers of the target read: masks, and the slots of convolutions."""
    layers = list(layers)
    return attention_masks(decoder, layers) | conv_slots(decoder, layers)


def segment_positions(decoder: DecoderInfo, first_layer: int, attention: Iterable[int]) -> Shape | None:
    """As `positions_shape`, of a graph that has the layers `attention` with their caches: angles are for those that are
    attention."""
    shape = positions_shape(decoder.position, first_layer)
    if decoder.position in ("rotary", "mrope") and not attention_masks(decoder, attention):
        return None
    return shape


def cross_caches(manifest: Manifest, layers: Iterable[int]) -> Values:
    """Keys and values of cross-attention."""
    decoder = manifest.decoder
    shape: Shape = ("batch", decoder.num_heads, "source", decoder.head_dim)
    return {
        f"cross_{kind}.{layer}": (manifest.cache_dtype, shape)
        for kind in ("key", "value")
        for layer in layers
    }


def own_layer(manifest: Manifest, cache: DraftCache, position: str = "rotary") -> tuple[Values, Values]:
    """What every graph takes and gives that is one layer with keys and values of its own: where its tokens stand, by
    positions of the kind `position`, what they see, and the cache."""
    positions = positions_shape(position, 0)
    assert positions is not None, f"a layer of its own does not read positions of the kind {position}"
    shape: Shape = ("batch", cache.num_kv_heads, "cache", cache.head_dim)
    own = dict.fromkeys(("key_cache.0", "value_cache.0"), (manifest.cache_dtype, shape))
    inputs: Values = {
        "positions": ("int64", positions),
        "write_indices": ("int64", ("batch",)),
        "attn_mask": ("bool", ("batch", 1, "width", "cache")),
        **own,
    }
    return inputs, {f"updated_{name}": value for name, value in own.items()}
