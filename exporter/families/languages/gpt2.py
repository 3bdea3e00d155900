"""GPT-2 with cross-attention: the decoder of image captioners (GPT2LMHeadModel with `add_cross_attention`).

A learned table of positions without offset; per layer norm, attention, norm, cross-attention, norm, MLP. Its linears
are stored [in, out].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from transformers import GPT2LMHeadModel

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.caches import CrossedLayerCache, LayerCache
from ...graphs.traced_module import TraceInput, trace
from ...graphs.weights import WeightStore
from ..common.decoder_graphs import Prologue, build_cross_kv
from ..common.parts import GraphSpec
from .base import Language, learned_positions, per_layer


def _add_positions(module: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
    return (hidden + torch.nn.functional.embedding(positions, module.weight),)


def _cross_kv(module: Any, encoder_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`c_attn` of a cross-attention gives keys and values side by side."""
    shape = (*encoder_states.shape[:-1], module.num_heads, module.head_dim)
    key, value = module.c_attn(encoder_states).split(module.split_size, dim=2)
    return key.view(shape).transpose(1, 2), value.view(shape).transpose(1, 2)


class GPT2Language(Language):
    """See the module."""

    name: ClassVar[str] = "gpt2"
    kind: ClassVar[Any] = GPT2LMHeadModel
    layers_path: ClassVar[str] = "transformer.h"
    norm_path: ClassVar[str] = "transformer.ln_f"
    embed_path: ClassVar[str] = "transformer.wte"
    attention_paths: ClassVar[tuple[str, ...]] = ("attn", "crossattention")
    source_paths: ClassVar[tuple[str, ...]] = ("crossattention.c_attn",)

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str) -> None:
        super().__init__(checkpoint, config, prefix)
        if not config.add_cross_attention:
            raise UnsupportedModelError("GPT-2: add_cross_attention=false is not supported")
        if config.num_hidden_layers < 2:
            raise UnsupportedModelError(f"GPT-2: a decoder of {config.num_hidden_layers} layer cannot be cut")
        self.max_positions = config.max_position_embeddings
        self.decoder = learned_positions(config, cross_attention=True)

    def prologue(self) -> Prologue:
        """Rows with the table of positions added."""
        inputs = [
            TraceInput("hidden", ("batch", "width", self.decoder.hidden_size)),
            TraceInput("positions", ("batch", "width"), torch.int64),
        ]
        template = trace(self.model.transformer.wpe, _add_positions, inputs, ("hidden_out",))
        return template, self.named("transformer.wpe.")

    def run_layer(self, module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See `Language`."""
        hidden = given["hidden"]
        own = LayerCache(given["key_cache"], given["value_cache"], given["write_indices"])
        out = module(
            hidden,
            past_key_values=CrossedLayerCache(own, given["cross_key"], given["cross_value"]),
            attention_mask=given["attn_mask"],
            encoder_hidden_states=hidden,  # only its presence matters: keys and values are cached
            encoder_attention_mask=given["cross_mask"],
        )
        return out, own.keys, own.values

    def source_graphs(self, store: WeightStore) -> Iterator[GraphSpec]:
        """cross_kv over the image embeddings; there is no text encoder."""
        blocks = self.model.transformer.h
        states = [TraceInput("encoder_states", ("batch", "source", self.decoder.hidden_size))]
        layer = per_layer(
            lambda i: (blocks[i].crossattention, self.named(f"transformer.h.{i}.crossattention.")),
            lambda module, _: trace(module, _cross_kv, states, ("key", "value")),
        )
        yield build_cross_kv(store, self.decoder, layer)
