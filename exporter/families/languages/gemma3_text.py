"""Gemma 3's language model (Gemma3ForCausalLM; arXiv 2503.19786): five layers that see a window for each that sees everything,
with rotary angles of their own, and four norms a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import Gemma3ForCausalLM
from transformers.models.gemma3 import modeling_gemma3

from ....runtime.common.errors import UnsupportedModelError
from ....runtime.graphs.values import MASKS
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.traced_module import TraceInput, trace
from ..common.decoder_graphs import Prologue
from .gemma import GemmaLanguage

REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3Language(GemmaLanguage):
    """See the module."""

    name: ClassVar[str] = "gemma3_text"
    kind: ClassVar[Any] = Gemma3ForCausalLM
    modeling: ClassVar[Any] = modeling_gemma3
    centered: ClassVar[Any] = modeling_gemma3.Gemma3RMSNorm
    angles: ClassVar[Any] = modeling_gemma3.Gemma3RotaryEmbedding
    windows: ClassVar[bool] = True
    attention_norm_path: ClassVar[str | None] = "post_attention_layernorm"
    mlp_norm_path: ClassVar[str | None] = "post_feedforward_layernorm"

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        for name in REFUSED:
            if value := getattr(config, name, None):
                raise UnsupportedModelError(f"{self.kind.__name__}: {name}={value!r:.40} is not supported")

    @property
    def ropes(self) -> dict[str, Mapping[str, Any]]:
        """Of every kind of layer that it has."""
        return {
            kind: self.config.rope_parameters.get(kind) or {} for kind in sorted({*self.config.layer_types})
        }

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
