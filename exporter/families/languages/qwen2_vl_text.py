"""The language model of Qwen2-VL: a Qwen2 whose rotary positions have three axes (M-RoPE; Wang et al., arXiv 2409.12191)."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl import modeling_qwen2_vl

from .qwen2_5_vl_text import Qwen2_5_VLLanguage


class Qwen2VLLanguage(Qwen2_5_VLLanguage):
    """See the module."""

    name: ClassVar[str] = "qwen2_vl_text"
    kind: ClassVar[Any] = Qwen2VLForConditionalGeneration
    modeling: ClassVar[Any] = modeling_qwen2_vl
    norm: ClassVar[Any] = modeling_qwen2_vl.Qwen2VLRMSNorm
    angles: ClassVar[Any] = modeling_qwen2_vl.Qwen2VLRotaryEmbedding
