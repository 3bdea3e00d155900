"""Gemma's language model (GemmaForCausalLM; arXiv 2403.08295): Llama's layers with norms whose weight is centered at 0, over
embeddings times √E.

Embeddings are the table times √E for whoever reads them: its own layers, and drafts, in graphs and while they are trained. The
factor is as transformers has it in the type that it computes in: exact in float32, 48 in place of 47.96 in a bfloat16 graph of
E = 2,304 (50.5 in place of 50.596 at 2,560).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, ClassVar

from transformers import GemmaForCausalLM
from transformers.models.gemma import modeling_gemma

from ....runtime.common.errors import UnsupportedModelError
from ...checkpoint.checkpoint import Checkpoint
from ...graphs.hooks import centered_rms_forward, replaced
from .llama import DYNAMIC, LlamaLanguage


class GemmaLanguage(LlamaLanguage):
    """See the module."""

    name: ClassVar[str] = "gemma"
    kind: ClassVar[Any] = GemmaForCausalLM
    modeling: ClassVar[Any] = modeling_gemma
    norm: ClassVar[Any] = None
    centered: ClassVar[Any] = modeling_gemma.GemmaRMSNorm
    """The class of its norms."""
    angles: ClassVar[Any] = modeling_gemma.GemmaRotaryEmbedding

    def __init__(self, checkpoint: Checkpoint, config: Any, prefix: str, body: str = "model.") -> None:
        super().__init__(checkpoint, config, prefix, body)
        if any(rope.get("rope_type") == DYNAMIC for rope in self.ropes.values()):
            raise UnsupportedModelError(f"{self.kind.__name__}: rope_type {DYNAMIC!r} is not supported")
        self.decoder = replace(self.decoder, embedding_scale=config.hidden_size**0.5)

    def hooks(self) -> AbstractContextManager[None]:
        """Llama's, and norms whose weight is centered at 0."""
        stack = ExitStack()
        stack.enter_context(super().hooks())
        stack.enter_context(replaced(self.centered, "forward", centered_rms_forward))
        return stack  # type: ignore[return-value]
