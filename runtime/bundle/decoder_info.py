"""What a manifest says of the shape of a decoder, and of a text encoder in front of it."""

# ruff: noqa: RUF009 - `checked` returns a dataclass field

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..graphs.values import LAYER_TYPES
from .schema import (
    FLOATS,
    Part,
    boolean,
    checked,
    integer,
    list_of,
    mapping_of,
    number,
    optional,
    string,
)

POSITIONS = ("relative_bias", "rotary", "mrope", "learned")
"""How a decoder knows where a row stands; see `bundle/interfaces.py` for what its graphs take."""

_HEADS = integer(1, 1024)


@dataclass(kw_only=True)
class RelativeBias(Part):
    """T5 relative-position bias: a [num_buckets, heads] tensor of the bundle."""

    tensor: str = checked(string(200))
    num_buckets: int = checked(integer(2, 65536))
    max_distance: int = checked(integer(2, 1 << 21))
    extra: dict[str, Any] = field(default_factory=dict)


_RELATIVE_BIAS = optional(RelativeBias.parse)


_LAYER_TYPES = optional(list_of(string(40, LAYER_TYPES), 1024))


@dataclass(kw_only=True)
class CacheInfo(Part):
    """One cache of a kind of layer: for every slot a row [num_heads, head_dim]. Graphs call it NAME.LAYER."""

    name: str = checked(string(40))
    num_heads: int = checked(_HEADS)
    head_dim: int = checked(integer(1, 1 << 20))
    extra: dict[str, Any] = field(default_factory=dict)


_LAYER_CACHES = optional(mapping_of(list_of(CacheInfo.parse, 16), string(40, LAYER_TYPES)))


@dataclass(kw_only=True)
class LinearAttention(Part):
    """Sizes of layers with linear attention (a gated delta rule, arXiv 2412.06464). `conv_kernel` is how many rows their
    convolution sees, a row itself included. A pass, and the rows that it replays, are at most `window` rows."""

    num_key_heads: int = checked(_HEADS)
    num_value_heads: int = checked(_HEADS)
    key_head_dim: int = checked(integer(1, 8192))
    value_head_dim: int = checked(integer(1, 8192))
    conv_kernel: int = checked(integer(2, 64))
    window: int = checked(integer(2, 1 << 16))
    extra: dict[str, Any] = field(default_factory=dict)


_LINEAR = optional(LinearAttention.parse)

SELDOM = ("whole_blocks", "layer_caches", "conv_kernel", "linear_attention")
"""Fields of `DecoderInfo` that a manifest has only where they say something."""


@dataclass(kw_only=True)
class DecoderInfo(Part):
    """Shape of the decoder and how it is cut: segment k holds layers cuts[k]..cuts[k + 1] − 1. `max_positions` is
    the size of the table of learned positions, `deepstack_layers` how many first layers a picture's embeddings are added
    behind.

    Layers whose kind in `layer_types` is "sliding_attention" see the last `sliding_window` positions, a token's own
    included; null: every layer sees everything before a token. `max_block` is the most rows of a part of a prompt that
    sees itself in both directions (a picture's, say); null: prompts are causal. Where `whole_blocks` is true it sees all of
    itself in layers with a window, too; else a row of it sees nothing before its window. Rows of the embedding table
    enter the decoder times `embedding_scale`; null: as they are.

    `layer_caches` are the caches of a layer by its kind; kinds that it does not name have `key_cache` and `value_cache`
    of num_kv_heads × head_dim. `conv_kernel` is how many tokens a causal convolution sees, a token itself included. `linear_attention` are the sizes of
    layers of that kind, which keep a state instead of caches."""

    num_layers: int = checked(integer(1, 1024))
    hidden_size: int = checked(integer(1, 1 << 20))
    num_heads: int = checked(_HEADS)
    num_kv_heads: int = checked(_HEADS)
    head_dim: int = checked(integer(1, 8192))
    position: str = checked(string(40, POSITIONS))
    mask_dtype: str = checked(string(20, ("bool", *FLOATS)))
    mask_heads: int = checked(_HEADS)
    cross_attention: bool = checked(boolean)
    cuts: list[int] = checked(list_of(integer(0, 1024), 1025))
    relative_bias: RelativeBias | None = checked(_RELATIVE_BIAS, default=None)
    max_positions: int | None = checked(optional(integer(1, 1 << 24)), default=None)
    deepstack_layers: int | None = checked(optional(integer(1, 64)), default=None)
    layer_types: list[str] | None = checked(_LAYER_TYPES, default=None)
    sliding_window: int | None = checked(optional(integer(1, 1 << 24)), default=None)
    max_block: int | None = checked(optional(integer(1, 1 << 24)), default=None)
    whole_blocks: bool | None = checked(optional(boolean), default=None)
    embedding_scale: float | None = checked(optional(number(1e-6, 1e6)), default=None)
    layer_caches: dict[str, list[CacheInfo]] | None = checked(_LAYER_CACHES, default=None)
    conv_kernel: int | None = checked(optional(integer(2, 64)), default=None)
    linear_attention: LinearAttention | None = checked(_LINEAR, default=None)
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As of every part, without fields that few models have where they are null."""
        return {
            name: value
            for name, value in super().to_dict().items()
            if value is not None or name not in SELDOM
        }


@dataclass(kw_only=True)
class EncoderInfo(Part):
    """The text encoder of an encoder-decoder model; heads and bias of its float mask."""

    num_heads: int = checked(_HEADS)
    relative_bias: RelativeBias | None = checked(_RELATIVE_BIAS, default=None)
    extra: dict[str, Any] = field(default_factory=dict)
