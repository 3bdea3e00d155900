"""Qwen3: a Llama whose queries and keys are normed head by head before they are rotated (Qwen3ForCausalLM)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

from .llama import LlamaLanguage


class Qwen3Language(LlamaLanguage):
    """See the module. The norms of queries and keys are RMS norms over head_dim, which need not be E / heads."""

    name: ClassVar[str] = "qwen3"
    kind: ClassVar[Any] = Qwen3ForCausalLM
    modeling: ClassVar[Any] = modeling_qwen3
    norm: ClassVar[Any] = modeling_qwen3.Qwen3RMSNorm
    angles: ClassVar[Any] = modeling_qwen3.Qwen3RotaryEmbedding
