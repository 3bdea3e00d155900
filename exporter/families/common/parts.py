"""What families, language models and vision towers say of themselves: graphs, shapes, modules, prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import nn


@dataclass(frozen=True)
class GraphSpec:
    """One graph of a bundle. `layers` is set for segments: [first, last); `wide` computes in float32 where `model`, on
    narrow weights, does not; `folded` computes what `model` does, without groups of queries, where that has them, and
    `wide_folded` what `wide` does."""

    name: str
    role: str
    model: ir.Model
    layers: tuple[int, int] | None = None
    wide: ir.Model | None = None
    folded: ir.Model | None = None
    wide_folded: ir.Model | None = None

    @property
    def files(self) -> dict[str, ir.Model]:
        """Name of every file → what it holds."""
        forms = {
            self.file: self.model, self.wide_file: self.wide, self.folded_file: self.folded,
            self.wide_folded_file: self.wide_folded,
        }  # fmt: skip
        return {name: model for name, model in forms.items() if name is not None and model is not None}

    @property
    def file(self) -> str:
        """Of `model`."""
        return f"{self.name}.onnx"

    @property
    def wide_file(self) -> str | None:
        """Of `wide`."""
        return None if self.wide is None else f"{self.name}.float32.onnx"

    @property
    def folded_file(self) -> str | None:
        """Of `folded`."""
        return None if self.folded is None else f"{self.name}.folded.onnx"

    @property
    def wide_folded_file(self) -> str | None:
        """Of `wide_folded`."""
        return None if self.wide_folded is None else f"{self.name}.float32.folded.onnx"


@dataclass(frozen=True)
class CacheShape:
    """One cache of a kind of layer, NAME.LAYER in graphs: for every slot a row [num_heads, head_dim]."""

    name: str
    num_heads: int
    head_dim: int


@dataclass(frozen=True)
class LinearAttentionShape:
    """Sizes of layers with linear attention; fields as in the manifest's `decoder.linear_attention`."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    window: int


@dataclass(frozen=True)
class DecoderShape:
    """What the runtime needs to know of the decoder; fields as in the manifest's `decoder`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    position: str
    mask_dtype: str
    mask_heads: int
    cross_attention: bool
    relative_bias: dict[str, Any] | None = None
    max_positions: int | None = None
    """Rows of a learned table of positions."""
    deepstack_layers: int | None = None
    """First layers behind which embeddings of pictures are added."""
    layer_types: list[str] | None = None
    """The kind of every layer, of `LAYER_TYPES` (`runtime/graphs/values.py`); None: full attention."""
    sliding_window: int | None = None
    """Positions that a layer with sliding attention sees, a token's own included."""
    max_block: int | None = None
    """Most rows of a part of a prompt that sees itself in both directions; None: prompts are causal. `Family.max_block` may say
    another number for a bundle."""
    whole_blocks: bool | None = None
    """Whether such a part sees all of itself in layers with sliding attention, too; else no more than the window holds."""
    embedding_scale: float | None = None
    """What a row of the embedding table is multiplied by, for whoever reads it; None: nothing."""
    layer_caches: dict[str, list[CacheShape]] | None = None
    """The caches of layers of a kind; those of a kind that has none here keep keys and values."""
    conv_kernel: int | None = None
    """Tokens that a causal convolution sees, a token itself included."""
    linear_attention: LinearAttentionShape | None = None
    """Of layers that keep a state instead of caches."""


@dataclass(frozen=True)
class Parts:
    """Modules of a real transformers model, for those who compare with it or learn from it.

    `lm_head(final_norm(hidden_states) * logit_scale)` are the logits of hidden states after the last of `layers`, x that is;
    with a `logit_cap` these are logit_cap · tanh(x / logit_cap) (`capped`). `encoder`
    is a text encoder; in the output of `vision_output`, `image_embeds` finds the embeddings [..., E] that the language
    model sees of pictures, and with `deepstack_layers` [..., (1 + layers) · E]; `put_deepstack` puts such embeddings there in
    place of what is added behind layers. `rotary` turns positions into angles, where the model has such a module.
    """

    layers: nn.ModuleList
    final_norm: nn.Module
    lm_head: nn.Module
    embed: nn.Module
    logit_scale: float = 1.0
    logit_cap: float | None = None
    encoder: nn.Module | None = None
    vision_output: nn.Module | None = None
    image_embeds: Callable[[Any], torch.Tensor] | None = None
    rotary: nn.Module | None = None
    put_deepstack: Callable[[Any, torch.Tensor], Any] | None = None

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """What the model makes of the LM head's logits."""
        cap = self.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @property
    def encoder_layers(self) -> nn.ModuleList | None:
        """The blocks of the text encoder, where there is one."""
        if self.encoder is None:
            return None
        return next(child for child in self.encoder.children() if isinstance(child, nn.ModuleList))


@dataclass(frozen=True)
class ReferencePrompt:
    """One request as the model's own processor and tokenizer lay it out.

    `input_ids` are what the model reads (empty for one that reads pictures only), `vision` the tensors of its vision
    tower, and `decoder_ids` what its decoder starts with, or None where that is `input_ids` itself. `positions` [axes, n]
    are those of the embeddings where they do not just count. `video_steps` are the time steps of each video's run of
    `video_token_id`, in order; those of one have equally many embeddings. Left out, a run is one step.
    """

    input_ids: tuple[int, ...] = ()
    vision: Mapping[str, torch.Tensor] | None = None
    decoder_ids: tuple[int, ...] | None = None
    positions: torch.Tensor | None = None
    video_steps: tuple[int, ...] = ()
