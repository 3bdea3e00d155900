"""T5: encoder, cross-attention keys and values, decoder segments (T5ForConditionalGeneration, FlanT5).

The relative-position bias of block 0 serves every block; it rides on the float masks that the runtime computes from
the bundled tables, so inside the graphs no block has a bias of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from transformers import EncoderDecoderCache, T5ForConditionalGeneration
from transformers.models.t5 import modeling_t5

from ...runtime.errors import UnsupportedModelError
from ..checkpoint.load import Checkpoint
from ..graphs.compose import Composer
from ..graphs.hollow import hollow_model, signature
from ..graphs.hooks import ATTENTION, export_hooks, kv_update
from ..graphs.template import Template, TraceInput, trace
from ..graphs.weights import WeightRef, WeightStore
from .base import DecoderShape, GraphSpec, build_embed, build_head, check_common, head_tensor, shared_tensor
from .segments import build_segment

Named = Callable[[str], str]


class _Updates(dict):
    """`EncoderDecoderCache.is_updated`: cross-attention keys and values are always there already."""

    def get(self, *_: Any) -> bool:
        return True


class _Layers:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def __getitem__(self, _: int) -> _Layers:
        return self


class _SelfCache:
    """One layer's cache, updated in place at `write_indices`."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, write_indices: torch.Tensor) -> None:
        self.keys, self.values, self.write_indices = keys, values, write_indices

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple:
        self.keys = kv_update(self.keys, keys, self.write_indices)
        self.values = kv_update(self.values, values, self.write_indices)
        return self.keys, self.values


class _CrossCache:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.layers = _Layers(keys, values)


class _Cache(EncoderDecoderCache):
    """What a decoder block sees while it is traced."""

    def __init__(self, own: _SelfCache, cross: _CrossCache) -> None:
        self.self_attention_cache, self.cross_attention_cache, self.is_updated = own, cross, _Updates()  # type: ignore[assignment]

    def get_seq_length(self, *_: Any) -> int:
        return 0


def _decoder_block(
    module: torch.nn.Module,
    hidden: torch.Tensor,
    write_indices: torch.Tensor,
    attn_mask: torch.Tensor,
    cross_mask: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cross_key: torch.Tensor,
    cross_value: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    own = _SelfCache(key_cache, value_cache, write_indices)
    unused = torch.zeros(1)  # a bias that is given is not computed; our attention ignores it
    out, *_ = module(
        hidden,
        attention_mask=attn_mask,
        position_bias=unused,
        encoder_hidden_states=hidden,  # only its presence matters: keys and values are cached
        encoder_attention_mask=cross_mask,
        encoder_decoder_position_bias=unused,
        past_key_values=_Cache(own, _CrossCache(cross_key, cross_value)),
    )
    return out, own.keys, own.values


def _encoder_block(
    module: torch.nn.Module, hidden: torch.Tensor, encoder_mask: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    out, *_ = module(hidden, attention_mask=encoder_mask, position_bias=torch.zeros(1))
    return (out,)


def _cross_kv(module: Any, encoder_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*encoder_states.shape[:-1], module.n_heads, module.key_value_proj_dim)
    return tuple(p(encoder_states).view(shape).transpose(1, 2) for p in (module.k, module.v))  # type: ignore[return-value]


class T5Language:
    """The T5 part of a model. `prefix` is where it sits in the checkpoint (`language_model.` in BLIP-2)."""

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str) -> None:
        self.config, self.prefix = config, prefix
        check_common(config, "T5")
        tensors = checkpoint.tensors
        tables = [
            prefix + n
            for n in ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        ]
        head = prefix + "lm_head.weight"
        table = shared_tensor(tensors, tables)
        if table not in tensors and head in tensors:
            table = head  # a tied checkpoint that kept only the head's name
        shape = (config.vocab_size, config.d_model)
        self.embedding = WeightRef((table,), False, shape)
        self.head = WeightRef(
            (head_tensor(tensors, table, head, bool(config.tie_word_embeddings)),), False, shape
        )
        buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
        if not 0 < buckets // 2 < distance:
            raise UnsupportedModelError(
                f"T5: relative_attention_max_distance={distance} is not above half of "
                f"relative_attention_num_buckets={buckets}"
            )
        if config.num_decoder_layers < 2:
            raise UnsupportedModelError(f"T5: a decoder of {config.num_decoder_layers} layer cannot be cut")
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

    def _bias(self, stack: str) -> dict[str, Any]:
        return {
            "tensor": f"{stack}.relative_bias",
            "num_buckets": self.config.relative_attention_num_buckets,
            "max_distance": self.config.relative_attention_max_distance,
        }

    def encoder_manifest(self) -> dict[str, Any]:
        """The manifest's `encoder`."""
        return {"num_heads": self.config.num_heads, "relative_bias": self._bias("encoder")}

    def tensors(self) -> dict[str, WeightRef]:
        """Embedding table and both bias tables [buckets, heads]."""
        shape = (self.config.relative_attention_num_buckets, self.config.num_heads)
        where = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        biases = {
            f"{s}.relative_bias": WeightRef((f"{self.prefix}{s}.{where}",), False, shape)
            for s in ("encoder", "decoder")
        }
        return {"embedding_table": self.embedding, **biases}

    @functools.cached_property
    def model(self) -> Any:
        """The hollow language model."""
        config = type(self.config).from_dict(self.config.to_dict())
        config.scale_decoder_outputs = self.config.scale_decoder_outputs
        config._attn_implementation = ATTENTION
        return hollow_model(lambda: T5ForConditionalGeneration(config))

    def hooks(self):
        """The hooks inside which graphs must be built."""
        return export_hooks(rms_norms=(modeling_t5.T5LayerNorm,))

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """encoder, cross_kv, embed, segments, head."""
        d, model = self.decoder, self.model
        templates: dict[tuple, Template] = {}
        yield self._encoder(store)
        yield self._cross_kv(store)
        yield build_embed(store, self.embedding)

        def layer(i: int) -> tuple[Template, Named]:
            block = model.decoder.block[i]
            key = signature(block)
            if key not in templates:
                templates[key] = self._trace_decoder_block(block)
            return templates[key], self._named(f"decoder.block.{i}.")

        for index, (first, last) in enumerate(itertools.pairwise(cuts)):
            yield build_segment(store, index, first, last, d, layer)
        norm = self._trace_norm(model.decoder.final_layer_norm, ("rows",))
        scale = d.hidden_size**-0.5 if model.config.scale_decoder_outputs else 1.0
        yield build_head(store, norm, self._named("decoder.final_layer_norm."), self.head, scale)

    def _named(self, path: str) -> Named:
        return lambda name: f"{self.prefix}{path}{name}"

    def _trace_norm(self, norm: torch.nn.Module, dims: tuple[str, ...]) -> Template:
        inputs = [TraceInput("hidden", (*dims, self.decoder.hidden_size))]
        return trace(norm, lambda module, hidden: (module(hidden),), inputs, ("hidden_out",))

    def _trace_decoder_block(self, block: torch.nn.Module) -> Template:
        d = self.decoder
        cache, cross = (
            ("batch", d.num_heads, "cache", d.head_dim),
            ("batch", d.num_heads, "source", d.head_dim),
        )
        inputs = [
            TraceInput("hidden", ("batch", "width", d.hidden_size)),
            TraceInput("write_indices", ("batch",), torch.int64),
            TraceInput("attn_mask", ("batch", d.num_heads, "width", "cache")),
            TraceInput("cross_mask", ("batch", 1, "width", "source"), torch.bool),
            TraceInput("key_cache", cache),
            TraceInput("value_cache", cache),
            TraceInput("cross_key", cross),
            TraceInput("cross_value", cross),
        ]
        return trace(
            block, _decoder_block, inputs, ("hidden_out", "updated_key_cache", "updated_value_cache")
        )

    def _encoder(self, store: WeightStore) -> GraphSpec:
        d, blocks = self.decoder, self.model.encoder.block
        graph = Composer("encoder", store)
        states = ("batch", "source", d.hidden_size)
        mask_shape = ("batch", d.num_heads, "source", "source")
        hidden = graph.input("encoder_rows", "float32", states)
        mask = graph.input("encoder_mask", "float32", mask_shape)
        templates: dict[tuple, Template] = {}
        for i, block in enumerate(blocks):
            key = signature(block)
            if key not in templates:
                inputs = [TraceInput("hidden", states), TraceInput("encoder_mask", mask_shape)]
                templates[key] = trace(block, _encoder_block, inputs, ("hidden_out",))
            given = {"hidden": hidden, "encoder_mask": mask}
            named = self._named(f"encoder.block.{i}.")
            hidden = graph.call(templates[key], f"block.{i}", given, named)["hidden_out"]
        norm = self._trace_norm(self.model.encoder.final_layer_norm, ("batch", "source"))
        named = self._named("encoder.final_layer_norm.")
        hidden = graph.call(norm, "norm", {"hidden": hidden}, named)["hidden_out"]
        graph.output("encoder_states", hidden, "float32", states)
        return GraphSpec("encoder", "encoder", graph.model())

    def _cross_kv(self, store: WeightStore) -> GraphSpec:
        d = self.decoder
        graph = Composer("cross_kv", store)
        states_shape = ("batch", "source", d.hidden_size)
        states = graph.input("encoder_states", "float32", states_shape)
        template: Template | None = None
        results = []
        for i, block in enumerate(self.model.decoder.block):
            attention = block.layer[1].EncDecAttention
            if template is None:
                template = trace(
                    attention, _cross_kv, [TraceInput("encoder_states", states_shape)], ("key", "value")
                )
            named = self._named(f"decoder.block.{i}.layer.1.EncDecAttention.")
            results.append(graph.call(template, f"layer.{i}", {"encoder_states": states}, named))
        shape = ("batch", d.num_heads, "source", d.head_dim)
        for kind in ("key", "value"):
            for i, result in enumerate(results):
                graph.output(f"cross_{kind}.{i}", result[kind], "float32", shape)
        return GraphSpec("cross_kv", "cross_kv", graph.model())


class T5Family:
    """Exports a plain T5ForConditionalGeneration (text to text)."""

    name: ClassVar[str] = "t5"
    decoder_name: ClassVar[str] = "t5"
    architectures: ClassVar[tuple[str, ...]] = ("T5ForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("t5",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.language = T5Language(checkpoint, checkpoint.config, "")
        self.decoder = self.language.decoder
        self.max_positions: int | None = None  # relative positions have no end

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """encoder, cross_kv, embed, segments, head."""
        with self.language.hooks():
            yield from self.language.graphs(cuts, store)

    def tensors(self) -> dict[str, WeightRef]:
        """Embedding table and bias tables."""
        return self.language.tensors()

    def encoder(self) -> dict[str, Any]:
        """The encoder's mask."""
        return self.language.encoder_manifest()

    def image(self) -> None:
        """Text only."""
        return

    def text(self) -> dict[str, Any]:
        """No image; the decoder starts with a token of its own."""
        start = self.checkpoint.generation_config.get("decoder_start_token_id")
        if start is None:
            start = getattr(self.checkpoint.config, "decoder_start_token_id", None)
        return {
            "image_token_id": None,
            "image_rows": None,
            "decoder_start_token_id": 0 if start is None else start,
        }
