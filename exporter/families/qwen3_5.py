"""Qwen3.5: Qwen3-VL's tower without DeepStack, its prompts, and a language model of which most layers are linear attention."""

from __future__ import annotations

from typing import Any, ClassVar

from .common.parts import Parts
from .qwen3_vl import Qwen3VLFamily
from .qwen_vl import QwenVLFamily
from .vision.qwen3 import Qwen3_5Vision


class Qwen3_5Family(Qwen3VLFamily):
    """Exports Qwen3_5ForConditionalGeneration."""

    name: ClassVar[str] = "qwen3.5"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen3_5ForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5",)
    tower: ClassVar[Any] = Qwen3_5Vision

    def parts(self, model: Any) -> Parts:
        """See `Family`; nothing is added behind a layer."""
        return QwenVLFamily.parts(self, model)
