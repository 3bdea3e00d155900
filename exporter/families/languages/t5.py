"""T5: encoder, cross-attention keys and values, decoder segments (T5ForConditionalGeneration, FlanT5).

The relative-position bias of block 0 serves every block; it rides on the float masks that the runtime computes from
the bundled tables, so inside the graphs no block has a bias of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import T5ForConditionalGeneration
from transformers.models.t5 import modeling_t5

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.caches import CrossedLayerCache, LayerCache
from ...graphs.composer import Composer
from ...graphs.hooks import export_hooks
from ...graphs.traced_module import Template, TraceInput, trace
from ...graphs.weights import WeightRef, WeightStore
from ..common.decoder_graphs import build_cross_kv
from ..common.embedding_names import shared_tensor
from ..common.parts import DecoderShape, GraphSpec
from .base import Language, per_layer

TABLES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _encoder_block(
    module: torch.nn.Module, hidden: torch.Tensor, encoder_mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    out, *_ = module(hidden, attention_mask=encoder_mask, position_bias=torch.zeros(1))
    return (out,)


def _cross_kv(module: Any, encoder_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*encoder_states.shape[:-1], module.n_heads, module.key_value_proj_dim)
    return tuple(p(encoder_states).view(shape).transpose(1, 2) for p in (module.k, module.v))  # type: ignore[return-value]


class T5Language(Language):
    """See the module."""

    name: ClassVar[str] = "t5"
    kind: ClassVar[Any] = T5ForConditionalGeneration
    layers_path: ClassVar[str] = "decoder.block"
    encoder_path: ClassVar[str | None] = "encoder.block"
    norm_path: ClassVar[str] = "decoder.final_layer_norm"
    embed_path: ClassVar[str] = "shared"
    attention_paths: ClassVar[tuple[str, ...]] = ("layer.0.SelfAttention", "layer.1.EncDecAttention")
    source_paths: ClassVar[tuple[str, ...]] = ("layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v")
    attention_values: ClassVar[int] = 3
    mlp_path: ClassVar[str] = "layer.2.DenseReluDense"
    reads_image_embeds: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str) -> None:
        super().__init__(checkpoint, config, prefix)
        buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
        if not 0 < buckets // 2 < distance:
            raise UnsupportedModelError(
                f"T5: relative_attention_max_distance={distance} is not above half of "
                f"relative_attention_num_buckets={buckets}"
            )
        if config.num_decoder_layers < 2:
            raise UnsupportedModelError(f"T5: a decoder of {config.num_decoder_layers} layer cannot be cut")
        if config.scale_decoder_outputs:
            self.logit_scale = config.d_model**-0.5
        self.decoder = DecoderShape(
            num_layers=config.num_decoder_layers,
            hidden_size=config.d_model,
            num_heads=config.num_heads,
            num_kv_heads=config.num_heads,
            head_dim=config.d_kv,
            position="relative_bias",
            mask_dtype="float32",
            mask_heads=config.num_heads,
            cross_attention=True,
            relative_bias=self._bias("decoder"),
        )

    @functools.cached_property
    def embedding(self) -> WeightRef:
        """The one table of encoder and decoder."""
        tables = [self.prefix + name for name in TABLES]
        name = shared_tensor(self.checkpoint, tables, f"{self.prefix}lm_head.weight")
        return WeightRef((name,), False, self._table_shape)

    def _bias(self, stack: str) -> dict[str, Any]:
        return {
            "tensor": f"{stack}.relative_bias",
            "num_buckets": self.config.relative_attention_num_buckets,
            "max_distance": self.config.relative_attention_max_distance,
        }

    def encoder(self) -> dict[str, Any]:
        """The manifest's `encoder`."""
        return {"num_heads": self.config.num_heads, "relative_bias": self._bias("encoder")}

    def encoder_module(self, language: Any) -> nn.Module:
        """The encoder stack."""
        return language.encoder

    def tensors(self) -> dict[str, WeightRef]:
        """Embedding table and both bias tables [buckets, heads]."""
        shape = (self.config.relative_attention_num_buckets, self.config.num_heads)
        where = "block.0.layer.0.SelfAttention."
        biases = {
            f"{stack}.relative_bias": WeightRef(
                (self.named(f"{stack}.{where}")("relative_attention_bias.weight"),), False, shape
            )
            for stack in ("encoder", "decoder")
        }
        return {"embedding_table": self.embedding, **biases}

    def hooks(self) -> AbstractContextManager[None]:
        """T5's norms are RMS norms."""
        return export_hooks(rms_norms=(modeling_t5.T5LayerNorm,))

    def run_layer(self, module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See `Language`."""
        hidden = given["hidden"]
        own = LayerCache(given["key_cache"], given["value_cache"], given["write_indices"])
        unused = torch.zeros(1)  # a bias that is given is not computed; our attention ignores it
        out, *_ = module(
            hidden,
            attention_mask=given["attn_mask"],
            position_bias=unused,
            encoder_hidden_states=hidden,  # only its presence matters: keys and values are cached
            encoder_attention_mask=given["cross_mask"],
            encoder_decoder_position_bias=unused,
            past_key_values=CrossedLayerCache(own, given["cross_key"], given["cross_value"]),
        )
        return out, own.keys, own.values

    def source_graphs(self, store: WeightStore) -> Iterator[GraphSpec]:
        """encoder, cross_kv."""
        yield self._encoder(store)
        blocks = self.model.decoder.block
        states = [TraceInput("encoder_states", ("batch", "source", self.decoder.hidden_size))]
        layer = per_layer(
            lambda i: (
                blocks[i].layer[1].EncDecAttention,
                self.named(f"decoder.block.{i}.layer.1.EncDecAttention."),
            ),
            lambda module, _: trace(module, _cross_kv, states, ("key", "value")),
        )
        yield build_cross_kv(store, self.decoder, layer)

    def _encoder(self, store: WeightStore) -> GraphSpec:
        d, blocks = self.decoder, self.model.encoder.block
        graph = Composer("encoder", store, "encoder")
        states = ("batch", "source", d.hidden_size)
        mask_shape = ("batch", d.num_heads, "source", "source")
        hidden, mask = graph.input("encoder_rows"), graph.input("encoder_mask")
        inputs = [TraceInput("hidden", states), TraceInput("encoder_mask", mask_shape)]

        def make(module: nn.Module, _: int) -> Template:
            return trace(module, _encoder_block, inputs, ("hidden_out",))

        layer = per_layer(lambda i: (blocks[i], self.named(f"encoder.block.{i}.")), make)
        for i in range(len(blocks)):
            template, names = layer(i)
            given = {"hidden": hidden, "encoder_mask": mask}
            hidden = graph.call(template, f"block.{i}", given, names)["hidden_out"]
        norm = self.trace_hidden(self.model.encoder.final_layer_norm, ("batch", "source"))
        names = self.named("encoder.final_layer_norm.")
        hidden = graph.call(norm, "norm", {"hidden": hidden}, names)["hidden_out"]
        graph.output("encoder_states", hidden)
        return GraphSpec("encoder", "encoder", graph.model())
