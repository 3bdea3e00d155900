"""Gemma 2's language model (Gemma2ForCausalLM; arXiv 2408.00118): four norms a layer, a window in every second one, scores and
logits that a tanh bounds (soft caps)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Gemma2ForCausalLM
from transformers.models.gemma2 import modeling_gemma2

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from .gemma import GemmaLanguage


class Gemma2Language(GemmaLanguage):
    """See the module."""

    name: ClassVar[str] = "gemma2"
    kind: ClassVar[Any] = Gemma2ForCausalLM
    modeling: ClassVar[Any] = modeling_gemma2
    centered: ClassVar[Any] = modeling_gemma2.Gemma2RMSNorm
    angles: ClassVar[Any] = modeling_gemma2.Gemma2RotaryEmbedding
    windows: ClassVar[bool] = True
    attention_norm_path: ClassVar[str | None] = "post_attention_layernorm"
    mlp_norm_path: ClassVar[str | None] = "post_feedforward_layernorm"

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            cap = getattr(config, name, None)
            if cap is not None and not (type(cap) in (int, float) and 0 < cap < float("inf")):
                raise UnsupportedModelError(
                    f"{self.kind.__name__}: {name}={cap!r:.40} is not a positive number"
                )
        cap = config.final_logit_softcapping
        self.logit_cap = None if cap is None else float(cap)
