"""Qwen2 and Qwen2.5: a Llama whose queries, keys and values have biases, and of which some layers may see a window only
(Qwen2ForCausalLM)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen2ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from .llama import LlamaLanguage


class Qwen2Language(LlamaLanguage):
    """See the module."""

    name: ClassVar[str] = "qwen2"
    kind: ClassVar[Any] = Qwen2ForCausalLM
    modeling: ClassVar[Any] = modeling_qwen2
    norm: ClassVar[Any] = modeling_qwen2.Qwen2RMSNorm
    angles: ClassVar[Any] = modeling_qwen2.Qwen2RotaryEmbedding
    windows: ClassVar[bool] = True
