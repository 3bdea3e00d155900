"""Releases in their authors' own format, whose classes transformers does not have, and the converted ones that it reads."""

from __future__ import annotations

import json
from pathlib import Path

from ...runtime.common.errors import UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign

CONVERTED = {
    "InternVLChatModel": "OpenGVLab/InternVL3-1B-hf, OpenGVLab/InternVL3-8B-hf or OpenGVLab/InternVL3_5-4B-HF",
    "LlavaLlamaForCausalLM": "llava-hf/llava-1.5-7b-hf, llava-hf/llava-1.5-13b-hf or llava-hf/llava-v1.6-vicuna-7b-hf",
    "LlavaMistralForCausalLM": "llava-hf/llava-v1.6-mistral-7b-hf",
    "LlavaQwenForCausalLM": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
}
"""Class of the authors' code → names of checkpoints in transformers' format."""


def check_converted(folder: Path) -> None:
    """UnsupportedModelError for a folder in the format of its authors' code, with the name of its converted form."""
    try:
        document = json.loads((folder / "config.json").read_text("utf-8"))
        classes = document.get("architectures") if isinstance(document, dict) else None
    except (OSError, ValueError, RecursionError) as error:
        raise_if_foreign(error)
        return  # transformers says what is wrong
    for name in classes if isinstance(classes, list) else ():
        if isinstance(name, str) and name in CONVERTED:
            raise UnsupportedModelError(
                f"{folder}: {name} is a class of the authors' own code, which transformers does not have; give the converted "
                f"form ({CONVERTED[name]})"
            )
