"""Gemma 3's language model (Gemma3ForCausalLM; arXiv 2503.19786): five layers that see a window for each that sees everything,
with rotary angles of their own, and four norms a layer.

Embeddings are the table times √E. Whatever reads embeddings of this model reads them so: its own layers, and drafts, in graphs
and while they are trained. The factor is as transformers has it in the type that it computes in: exact in float32, 50.5
in place of 50.596 in a bfloat16 graph of the 4B.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import torch
from transformers import Gemma3ForCausalLM
from transformers.models.gemma3 import modeling_gemma3

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.graphs.values import MASKS
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.hooks import replaced, rms_norm
from ...graphs.traced_module import TraceInput, trace
from ..common.decoder_graphs import Prologue
from .llama import DYNAMIC, LlamaLanguage

REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _one_centered(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Gemma3RMSNorm's forward: its weight is what the scale differs from 1 by."""
    return rms_norm(x, 1.0 + self.weight, float(self.eps))


class Gemma3Language(LlamaLanguage):
    """See the module."""

    name: ClassVar[str] = "gemma3_text"
    kind: ClassVar[Any] = Gemma3ForCausalLM
    modeling: ClassVar[Any] = modeling_gemma3
    norm: ClassVar[Any] = None
    angles: ClassVar[Any] = modeling_gemma3.Gemma3RotaryEmbedding
    windows: ClassVar[bool] = True
    attention_norm_path: ClassVar[str | None] = "post_attention_layernorm"
    mlp_norm_path: ClassVar[str | None] = "post_feedforward_layernorm"

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        for name in REFUSED:
            if value := getattr(config, name, None):
                raise UnsupportedModelError(f"{self.kind.__name__}: {name}={value!r:.40} is not supported")
        if any(rope.get("rope_type") == DYNAMIC for rope in self.ropes.values()):
            raise UnsupportedModelError(f"{self.kind.__name__}: rope_type {DYNAMIC!r} is not supported")
        self.decoder = replace(self.decoder, embedding_scale=config.hidden_size**0.5)

    @property
    def ropes(self) -> dict[str, Mapping[str, Any]]:
        """Of every kind of layer that it has."""
        return {
            kind: self.config.rope_parameters.get(kind) or {} for kind in sorted({*self.config.layer_types})
        }

    def hooks(self) -> AbstractContextManager[None]:
        """Llama's, and norms whose weight is centered at 0."""
        stack = ExitStack()
        stack.enter_context(super().hooks())
        stack.enter_context(replaced(modeling_gemma3.Gemma3RMSNorm, "forward", _one_centered))
        return stack  # type: ignore[return-value]

    def prologues(self) -> dict[str, Prologue]:
        """The angles of each kind of layer."""
        angles = self.angles(self.config).eval()
        return {kind: (_angles(angles, kind), str) for kind in MASKS if kind in self.config.layer_types}


def _angles(module: Any, kind: str) -> Any:
    def run(module: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = module(torch.zeros(1), positions, kind)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]

    return trace(module, run, [TraceInput("positions", ("batch", "width"), torch.int64)], ("cos", "sin"))
