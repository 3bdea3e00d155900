"""Known releases that cannot be exported as they are: what to give in their place, or why nothing helps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...runtime.common.errors import UnsupportedModelError
from ...runtime.common.foreign_errors import raise_if_foreign

CONVERTED = {
    "InternVLChatModel": "OpenGVLab/InternVL3-1B-hf, OpenGVLab/InternVL3-8B-hf or OpenGVLab/InternVL3_5-4B-HF",
    "LlavaLlamaForCausalLM": "llava-hf/llava-1.5-7b-hf, llava-hf/llava-1.5-13b-hf or llava-hf/llava-v1.6-vicuna-7b-hf",
    "LlavaMistralForCausalLM": "llava-hf/llava-v1.6-mistral-7b-hf",
    "LlavaQwenForCausalLM": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
}
"""Class of the authors' code → names of checkpoints in transformers' format."""

OWN_CODE = "its class comes as code with the checkpoint, and such code is never run"
ACTIONS = "it makes actions by flow matching, no tokens: there is nothing to draft"
REFUSED = {
    "lfm2-vl": f"the first release of LFM2-VL: {OWN_CODE}; take the files of its current one, whose model_type is lfm2_vl",
    "moondream1": f"Moondream: {OWN_CODE}",
    "moondream3": f"Moondream: {OWN_CODE}",
    "openvla": f"OpenVLA: {OWN_CODE}",
    "pi0": f"pi0: {ACTIONS}",
    "pi05": f"pi0.5: {ACTIONS}",
    "smolvla": f"SmolVLA: {ACTIONS}",
}
"""`model_type` of transformers, or `type` of a policy of LeRobot → the model, and why it is refused."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations give the number of a layer's experts."""


def check_exportable(folder: Path) -> None:
    """UnsupportedModelError for a folder in the format of its authors' code, with the name of its converted form, and for a
    model that cannot be exported, with the reason."""
    try:
        document = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise_if_foreign(error)
        return  # transformers says what is wrong
    if not isinstance(document, dict):
        return
    classes = document.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if isinstance(name, str) and name in CONVERTED:
            raise UnsupportedModelError(
                f"{folder}: {name} is a class of the authors' own code, which transformers does not have; give the converted "
                f"form ({CONVERTED[name]})"
            )
    for kind in (document.get("model_type"), document.get("type")):
        if isinstance(kind, str) and kind in REFUSED:
            raise UnsupportedModelError(f"{folder} is not supported: {REFUSED[kind]}")
    for part in (document, *(value for value in document.values() if isinstance(value, dict))):
        _check_experts(part, folder)


def _check_experts(config: Mapping[str, Any], folder: Path) -> None:
    for name in EXPERTS:
        count = config.get(name)
        if type(count) is int and count > 1:
            raise UnsupportedModelError(
                f"{folder} is not supported: {name}={count} makes it a mixture of experts, and ONNX has no operator that "
                "runs the chosen experts alone; give a dense model of the same series"
            )
