"""LLaVA-NeXT (LLaVA-1.6): pictures as a whole and in tiles in the prompt of a Llama (Liu et al., 2024)."""

from __future__ import annotations

from typing import Any, ClassVar

from .llava import LlavaFamily
from .vision.clip_tiles import ClipTilesVision


class LlavaNextFamily(LlavaFamily):
    """Exports LlavaNextForConditionalGeneration of CLIP and Llama (Vicuna); its processor lays out prompts as LLaVA's."""

    name: ClassVar[str] = "llava-next"
    architectures: ClassVar[tuple[str, ...]] = ("LlavaNextForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("llava_next",)
    tower: ClassVar[Any] = ClipTilesVision
