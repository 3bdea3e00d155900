"""Llama: rotary positions, grouped-query attention, gated MLP, RMS norms (LlamaForCausalLM)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ...runtime.errors import UnsupportedModelError
from ..checkpoint.load import Checkpoint
from ..graphs.hollow import hollow_model, signature
from ..graphs.hooks import ATTENTION, export_hooks, kv_update
from ..graphs.template import Template, TraceInput, trace
from ..graphs.weights import WeightRef, WeightStore
from .base import DecoderShape, GraphSpec, build_embed, build_head, check_common, head_tensor
from .segments import build_segment

# Angles of these types are a function of the position alone; dynamic and longrope also depend on the length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class _Cache:
    """The cache that a decoder layer sees while it is traced: one layer, updated in place at `write_indices`."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, write_indices: torch.Tensor) -> None:
        self.keys, self.values, self.write_indices = keys, values, write_indices

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple:
        self.keys = kv_update(self.keys, keys, self.write_indices)
        self.values = kv_update(self.values, values, self.write_indices)
        return self.keys, self.values


def _layer(
    module: torch.nn.Module,
    hidden: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    write_indices: torch.Tensor,
    attn_mask: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    cache = _Cache(key_cache, value_cache, write_indices)
    out = module(hidden, attention_mask=attn_mask, position_embeddings=(cos, sin), past_key_values=cache)
    return out, cache.keys, cache.values


def _angles(module: torch.nn.Module, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = module(torch.zeros(1), positions)
    half = cos.shape[-1] // 2  # transformers repeats the angles for both halves of a head
    return cos[..., :half], sin[..., :half]


class LlamaFamily:
    """Exports LlamaForCausalLM."""

    name: ClassVar[str] = "llama"
    decoder_name: ClassVar[str] = "llama"
    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM",)
    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        config = self.config = checkpoint.config
        check_common(config, "LlamaForCausalLM")
        rope = config.rope_parameters or {}
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"LlamaForCausalLM: rope_type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}"
            )
        if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
            raise UnsupportedModelError("LlamaForCausalLM: partial_rotary_factor is not supported")
        self.decoder = DecoderShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            position="rotary",
            mask_dtype="bool",
            mask_heads=1,
            cross_attention=False,
        )
        self.max_positions = config.max_position_embeddings
        embedding = "model.embed_tokens.weight"
        tensors = checkpoint.tensors
        if embedding not in tensors and config.tie_word_embeddings and "lm_head.weight" in tensors:
            embedding = "lm_head.weight"
        head = head_tensor(tensors, embedding, "lm_head.weight", bool(config.tie_word_embeddings))
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = WeightRef((embedding,), False, shape)
        self._head = WeightRef((head,), False, shape)

    @functools.cached_property
    def _model(self) -> Any:
        config: Any = type(self.config).from_dict(self.config.to_dict())
        config._attn_implementation = ATTENTION
        model: Any = hollow_model(lambda: LlamaForCausalLM(config))
        model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config).eval()
        return model

    def graphs(self, cuts: Sequence[int], store: WeightStore) -> Iterator[GraphSpec]:
        """embed, segments, head."""
        d = self.decoder
        with self._hooks():
            yield build_embed(store, self._embedding)
            templates: dict[tuple, Template] = {}
            angles = trace(
                self._model.model.rotary_emb,
                _angles,
                [TraceInput("positions", ("batch", "width"), torch.int64)],
                ("cos", "sin"),
            )

            def layer(i: int) -> tuple[Template, Callable[[str], str]]:
                module = self._model.model.layers[i]
                key = signature(module)
                if key not in templates:
                    templates[key] = self._trace_layer(module)
                return templates[key], lambda name: f"model.layers.{i}.{name}"

            for index, (first, last) in enumerate(itertools.pairwise(cuts)):
                yield build_segment(store, index, first, last, d, layer, angles)
            norm = trace(
                self._model.model.norm,
                lambda module, hidden: (module(hidden),),
                [TraceInput("hidden", ("rows", d.hidden_size))],
                ("hidden_out",),
            )
            yield build_head(store, norm, lambda name: f"model.norm.{name}", self._head)

    def _trace_layer(self, module: torch.nn.Module) -> Template:
        d = self.decoder
        cache = ("batch", d.num_kv_heads, "cache", d.head_dim)
        inputs = [
            TraceInput("hidden", ("batch", "width", d.hidden_size)),
            TraceInput("cos", ("batch", "width", d.head_dim // 2)),
            TraceInput("sin", ("batch", "width", d.head_dim // 2)),
            TraceInput("write_indices", ("batch",), torch.int64),
            TraceInput("attn_mask", ("batch", 1, "width", "cache"), torch.bool),
            TraceInput("key_cache", cache),
            TraceInput("value_cache", cache),
        ]
        return trace(module, _layer, inputs, ("hidden_out", "updated_key_cache", "updated_value_cache"))

    def _hooks(self):
        return export_hooks(rms_norms=(modeling_llama.LlamaRMSNorm,), rotary_modules=(modeling_llama,))

    def tensors(self) -> dict[str, WeightRef]:
        """The embedding table."""
        return {"embedding_table": self._embedding}

    def encoder(self) -> None:
        """A decoder-only model has no encoder."""
        return

    def image(self) -> None:
        """Text only."""
        return

    def text(self) -> dict[str, Any]:
        """No image token and no decoder start."""
        return {"image_token_id": None, "image_rows": None, "decoder_start_token_id": None}
