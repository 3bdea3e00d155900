"""Model families: how an image and a prompt become the positions of a prompt. One file per family."""

from __future__ import annotations

from importlib import import_module

from ..common.errors import BundleError
from .base import Family, Prepared, Prompt, RawPrompt

FAMILIES = {
    "blip2": ("blip2", "Blip2"),
    "gemma3": ("gemma3", "Gemma3"),
    "internvl": ("internvl", "InternVL"),
    "lfm2-vl": ("lfm2_vl", "Lfm2VL"),
    "llama": ("llama", "Llama"),
    "llava": ("llava", "Llava"),
    "llava-next": ("llava_next", "LlavaNext"),
    "paligemma": ("paligemma", "PaliGemma"),
    "qwen2-vl": ("qwen2_vl", "Qwen2VL"),
    "qwen2.5-vl": ("qwen2_5_vl", "Qwen25VL"),
    "qwen3-vl": ("qwen3_vl", "Qwen3VL"),
    "qwen3.5": ("qwen3_5", "Qwen35"),
    "smolvlm": ("smolvlm", "SmolVLM"),
    "t5": ("t5", "T5"),
    "vit-gpt2": ("vit_gpt2", "ViTGPT2"),
}
"""Family name in `model.family` → (module, class). A new family is one line here."""


def get_family(name: str) -> Family:
    """The family called `name` in a manifest. Raises `BundleError` when this version does not know it."""
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise BundleError(
            f"manifest field 'model.family': {name!r} is unknown to this version, which knows {known}; "
            "upgrade with `pip install --upgrade vlmexport`"
        )
    module, kind = FAMILIES[name]
    return getattr(import_module(f".{module}", __name__), kind)()


__all__ = ["FAMILIES", "Family", "Prepared", "Prompt", "RawPrompt", "get_family"]
