"""The recipes' models by architecture. A new recipe is one line here."""

from __future__ import annotations

import json
from pathlib import Path

from vlmexport.runtime.common.errors import OptionError

from .common.captioner import Captioner
from .smollm2_llava.captioner import SmolLlava
from .tiny_blip2_flant5.captioner import Blip2T5
from .tiny_qwen2_5_vl.captioner import Qwen25VL
from .tiny_smolvlm2.captioner import SmolVLM2
from .tiny_vit_gpt2.captioner import ViTGPT2

CAPTIONERS: dict[str, type[Captioner]] = {
    "Blip2ForConditionalGeneration": Blip2T5,
    "LlavaForConditionalGeneration": SmolLlava,
    "Qwen2_5_VLForConditionalGeneration": Qwen25VL,
    "SmolVLMForConditionalGeneration": SmolVLM2,
    "VisionEncoderDecoderModel": ViTGPT2,
}


def captioner_of(architecture: str) -> type[Captioner]:
    """The recipe's view of a class of transformers; OptionError where no recipe has it."""
    if architecture not in CAPTIONERS:
        raise OptionError(f"no recipe makes a {architecture}; they make {', '.join(CAPTIONERS)}")
    return CAPTIONERS[architecture]


def open_captioner(folder: Path, device: str = "cpu") -> Captioner:
    """The model of a folder that a recipe made, in float32."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return captioner_of(architecture).open(folder, device)
