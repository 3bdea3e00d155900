"""Llama: rotary positions, grouped-query attention, gated MLP, RMS norms (LlamaForCausalLM)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.graphs.values import positions_shape
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.caches import LayerCache
from ...graphs.hooks import attend_within, export_hooks, rotary_angles
from ...graphs.traced_module import TraceInput, trace
from ..common.config_checks import windows_of
from ..common.decoder_graphs import Prologue
from ..common.parts import DecoderShape
from .base import Language

# Angles of these types are a function of the position alone; longrope also depends on the length.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Angles of this type depend on the length, too, but only behind max_position_embeddings, where no bundle goes.
DYNAMIC = "dynamic"


class LlamaLanguage(Language):
    """See the module."""

    name: ClassVar[str] = "llama"
    kind: ClassVar[Any] = LlamaForCausalLM
    layers_path: ClassVar[str] = "model.layers"
    norm_path: ClassVar[str] = "model.norm"
    embed_path: ClassVar[str] = "model.embed_tokens"
    position: ClassVar[str] = "rotary"
    modeling: ClassVar[Any] = modeling_llama
    """The module of transformers with the layers."""
    norm: ClassVar[Any] = modeling_llama.LlamaRMSNorm
    """The class of its norms; None where they are of another kind."""
    angles: ClassVar[Any] = modeling_llama.LlamaRotaryEmbedding
    partial_rotary: ClassVar[bool] = False
    """Whether a part of a head may stay as it is."""

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        # Positions of three axes may run ahead of the length of a prompt.
        known = (*ROPE_TYPES, DYNAMIC) if self.position == "rotary" else ROPE_TYPES
        for rope in self.ropes.values():
            kind, whose = rope.get("rope_type", "default"), self.kind.__name__
            if kind not in known:
                raise UnsupportedModelError(
                    f"{whose}: rope_type {kind!r} is not supported, only {', '.join(known)}"
                )
            if not self.partial_rotary and rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
                raise UnsupportedModelError(f"{whose}: partial_rotary_factor is not supported")
        self.max_positions = config.max_position_embeddings
        self.decoder = DecoderShape(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            position=self.position,
            mask_dtype="bool",
            mask_heads=1,
            cross_attention=False,
            **windows_of(config),
        )

    def hooks(self) -> AbstractContextManager[None]:
        """RMS norms and rotary embeddings become one operator each."""
        attention = attend_within(self.decoder.sliding_window)
        norms = () if self.norm is None else (self.norm,)
        return export_hooks(rms_norms=norms, rotary_modules=(self.modeling,), attention=attention)

    def prologue(self) -> Prologue:
        """The angles of the positions."""
        angles = self.angles(self.config).eval()  # the hollow one's buffers are empty
        if angles.rope_type == DYNAMIC:
            angles.rope_type = "default"  # with the frequencies that it has up to max_position_embeddings
        shape = positions_shape(self.decoder.position, 0)
        assert shape is not None
        positions = [TraceInput("positions", shape, torch.int64)]
        return trace(angles, rotary_angles, positions, ("cos", "sin")), str

    def run_layer(self, module: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """See `Language`."""
        cache = LayerCache(given["key_cache"], given["value_cache"], given["write_indices"])
        out = module(
            given["hidden"],
            attention_mask=given["attn_mask"],
            position_embeddings=(given["cos"], given["sin"]),
            past_key_values=cache,
        )
        return out, cache.keys, cache.values
