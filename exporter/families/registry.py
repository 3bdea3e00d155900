"""Which family exports which architecture."""

from __future__ import annotations

import difflib

from ...runtime.common.errors import UnsupportedModelError
from ..checkpoint.checkpoint import Checkpoint
from .blip2 import Blip2Family
from .common.base import Family
from .gemma3 import Gemma3Family
from .internvl import InternVLFamily
from .lfm2_vl import Lfm2VLFamily
from .llama import LlamaFamily
from .llava import LlavaFamily
from .llava_next import LlavaNextFamily
from .paligemma import PaliGemmaFamily
from .qwen2_5_vl import Qwen2_5_VLFamily
from .qwen2_vl import Qwen2VLFamily
from .qwen3_5 import Qwen3_5Family
from .qwen3_vl import Qwen3VLFamily
from .smolvlm import SmolVLMFamily
from .t5 import T5Family
from .vit_gpt2 import ViTGPT2Family

FAMILIES: tuple[type[Family], ...] = (
    Blip2Family,
    Gemma3Family,
    InternVLFamily,
    Lfm2VLFamily,
    LlamaFamily,
    LlavaFamily,
    LlavaNextFamily,
    PaliGemmaFamily,
    Qwen2VLFamily,
    Qwen2_5_VLFamily,
    Qwen3VLFamily,
    Qwen3_5Family,
    SmolVLMFamily,
    T5Family,
    ViTGPT2Family,
)


def architectures() -> dict[str, str]:
    """Architecture → family name."""
    return {a: f.name for f in FAMILIES for a in f.architectures}


def family_for(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint; UnsupportedModelError names the architecture and what is supported."""
    kind = checkpoint.config.model_type
    for family in FAMILIES:
        if checkpoint.architecture in family.architectures:
            if kind not in family.model_types:  # another model's configuration under a supported class name
                raise UnsupportedModelError(
                    f"{checkpoint.architecture} with model_type {kind!r} is not supported, only "
                    f"{', '.join(family.model_types)}; correct config.json"
                )
            return family(checkpoint)
    known = list(architectures())
    if not checkpoint.config.architectures:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: config.json has no 'architectures'; add the model's class, one of {', '.join(known)}"
        )
    near = difflib.get_close_matches(checkpoint.architecture, known, n=1)
    raise UnsupportedModelError(
        f"{checkpoint.architecture} (model_type {kind!r}) is not supported; "
        f"supported are {', '.join(known)}" + (f"; nearest is {near[0]}" if near else "")
    )
