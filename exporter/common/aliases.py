"""Short names of models, and the drafts that come with them."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ...runtime.common.errors import OptionError
from ...runtime.common.paths import exists, is_folder
from .tiny_models import find_tiny_models, tiny_model

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Alias:
    """A short name. Exactly one of `hub_id` and `bundled` says where the model is."""

    name: str
    family: str
    description: str
    hub_id: str = ""
    bundled: str = ""
    default_prompt: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of a tiny model, None for a model of a hub. Raises OptionError where it is not installed."""
        return tiny_model(self.bundled) if self.bundled else None

    def draft_folders(self) -> list[Path]:
        """Folders of the trained drafts that come with it, of any kind, sorted by name (n3 before n10); none where the
        tiny models are not installed."""
        models = find_tiny_models()
        files = [] if models is None else (models / "drafts" / self.name).glob("*/draft.json")
        return sorted((p.parent for p in files), key=lambda p: (len(p.name), p.name))


ALIASES: tuple[Alias, ...] = (
    Alias(
        "tiny-blip2-flant5",
        "blip2",
        "4 M parameters, trained on generated tabletop scenes; one of vlmexport-tiny-models",
        bundled="tiny-blip2-flant5",
        default_prompt="describe the scene",
    ),
    Alias(
        "tiny-vit-gpt2",
        "vit-gpt2",
        "3.6 M parameters, captions generated tabletop scenes; one of vlmexport-tiny-models",
        bundled="tiny-vit-gpt2",
    ),
    Alias(
        "tiny-qwen2.5-vl",
        "qwen2.5-vl",
        "3.2 M parameters, sees pictures and films of generated tabletop scenes; one of vlmexport-tiny-models",
        bundled="tiny-qwen2.5-vl",
        default_prompt="describe the scene",
    ),
    Alias(
        "blip2-flant5", "blip2", "BLIP-2 with FlanT5-XL, 4 B parameters", hub_id="Salesforce/blip2-flan-t5-xl"
    ),
    Alias("blip2-flant5-xxl", "blip2", "BLIP-2 with FlanT5-XXL, 12 B", hub_id="Salesforce/blip2-flan-t5-xxl"),
    Alias("blip2-opt", "blip2", "BLIP-2 with OPT-2.7B, 4 B parameters", hub_id="Salesforce/blip2-opt-2.7b"),
    Alias(
        "vit-gpt2",
        "vit-gpt2",
        "image captioning with ViT and GPT-2, 240 M parameters",
        hub_id="nlpconnect/vit-gpt2-image-captioning",
    ),
    Alias("llava-1.5-7b", "llava", "LLaVA-1.5 with Vicuna-7B", hub_id="llava-hf/llava-1.5-7b-hf"),
    Alias("llava-1.5-13b", "llava", "LLaVA-1.5 with Vicuna-13B", hub_id="llava-hf/llava-1.5-13b-hf"),
    Alias(
        "llava-1.6-vicuna-7b",
        "llava-next",
        "LLaVA-1.6 (LLaVA-NeXT) with Vicuna-7B",
        hub_id="llava-hf/llava-v1.6-vicuna-7b-hf",
    ),
    Alias(
        "llava-1.6-vicuna-13b",
        "llava-next",
        "LLaVA-1.6 (LLaVA-NeXT) with Vicuna-13B",
        hub_id="llava-hf/llava-v1.6-vicuna-13b-hf",
    ),
    Alias("internvl3-1b", "internvl", "InternVL3 1B", hub_id="OpenGVLab/InternVL3-1B-hf"),
    Alias("internvl3-2b", "internvl", "InternVL3 2B", hub_id="OpenGVLab/InternVL3-2B-hf"),
    Alias("internvl3-8b", "internvl", "InternVL3 8B", hub_id="OpenGVLab/InternVL3-8B-hf"),
    Alias("internvl3.5-1b", "internvl", "InternVL3.5 1B", hub_id="OpenGVLab/InternVL3_5-1B-HF"),
    Alias("internvl3.5-2b", "internvl", "InternVL3.5 2B", hub_id="OpenGVLab/InternVL3_5-2B-HF"),
    Alias("internvl3.5-4b", "internvl", "InternVL3.5 4B", hub_id="OpenGVLab/InternVL3_5-4B-HF"),
    Alias("internvl3.5-8b", "internvl", "InternVL3.5 8B", hub_id="OpenGVLab/InternVL3_5-8B-HF"),
    Alias("lfm2-vl-450m", "lfm2-vl", "LFM2-VL 450M, sees pictures", hub_id="LiquidAI/LFM2-VL-450M"),
    Alias("lfm2-vl-1.6b", "lfm2-vl", "LFM2-VL 1.6B, sees pictures", hub_id="LiquidAI/LFM2-VL-1.6B"),
    Alias("qwen2-vl-2b", "qwen2-vl", "Qwen2-VL 2B Instruct", hub_id="Qwen/Qwen2-VL-2B-Instruct"),
    Alias("qwen2-vl-7b", "qwen2-vl", "Qwen2-VL 7B Instruct", hub_id="Qwen/Qwen2-VL-7B-Instruct"),
    Alias("gemma3-4b", "gemma3", "Gemma 3 4B, instruction-tuned", hub_id="google/gemma-3-4b-it"),
    Alias("gemma3-1b", "llama", "Gemma 3 1B, text only", hub_id="google/gemma-3-1b-it"),
    Alias("gemma3-270m", "llama", "Gemma 3 270M, text only", hub_id="google/gemma-3-270m-it"),
    Alias(
        "paligemma2-3b-pt-224",
        "paligemma",
        "PaliGemma 2 3B to train further, pictures of 224 x 224",
        hub_id="google/paligemma2-3b-pt-224",
        default_prompt="caption en",
    ),
    Alias(
        "paligemma2-3b-mix-224",
        "paligemma",
        "PaliGemma 2 3B for several tasks, pictures of 224 x 224",
        hub_id="google/paligemma2-3b-mix-224",
        default_prompt="caption en",
    ),
    Alias(
        "paligemma2-3b-mix-448",
        "paligemma",
        "PaliGemma 2 3B for several tasks, pictures of 448 x 448",
        hub_id="google/paligemma2-3b-mix-448",
        default_prompt="caption en",
    ),
    Alias(
        "paligemma-3b-mix-224",
        "paligemma",
        "PaliGemma 3B for several tasks, pictures of 224 x 224",
        hub_id="google/paligemma-3b-mix-224",
        default_prompt="caption en",
    ),
    Alias("qwen2.5-vl-3b", "qwen2.5-vl", "Qwen2.5-VL 3B Instruct", hub_id="Qwen/Qwen2.5-VL-3B-Instruct"),
    Alias("qwen2.5-vl-7b", "qwen2.5-vl", "Qwen2.5-VL 7B Instruct", hub_id="Qwen/Qwen2.5-VL-7B-Instruct"),
    Alias("qwen3-vl-2b", "qwen3-vl", "Qwen3-VL 2B Instruct", hub_id="Qwen/Qwen3-VL-2B-Instruct"),
    Alias("qwen3-vl-4b", "qwen3-vl", "Qwen3-VL 4B Instruct", hub_id="Qwen/Qwen3-VL-4B-Instruct"),
    Alias("qwen3-vl-8b", "qwen3-vl", "Qwen3-VL 8B Instruct", hub_id="Qwen/Qwen3-VL-8B-Instruct"),
    Alias("qwen3.5-0.8b", "qwen3.5", "Qwen3.5 0.8B, sees pictures and videos", hub_id="Qwen/Qwen3.5-0.8B"),
    Alias("qwen3.5-2b", "qwen3.5", "Qwen3.5 2B, sees pictures and videos", hub_id="Qwen/Qwen3.5-2B"),
    Alias("qwen3.5-4b", "qwen3.5", "Qwen3.5 4B, sees pictures and videos", hub_id="Qwen/Qwen3.5-4B"),
    Alias(
        "cosmos-reason1-7b",
        "qwen2.5-vl",
        "Cosmos-Reason1 7B (a Qwen2.5-VL), about physical scenes",
        hub_id="nvidia/Cosmos-Reason1-7B",
    ),
    Alias(
        "cosmos-reason2-2b",
        "qwen3-vl",
        "Cosmos-Reason2 2B (a Qwen3-VL), about physical scenes",
        hub_id="nvidia/Cosmos-Reason2-2B",
    ),
    Alias(
        "cosmos-reason2-8b",
        "qwen3-vl",
        "Cosmos-Reason2 8B (a Qwen3-VL), about physical scenes",
        hub_id="nvidia/Cosmos-Reason2-8B",
    ),
    Alias(
        "smolvlm2-256m",
        "smolvlm",
        "SmolVLM2-256M-Video-Instruct, sees pictures and videos",
        hub_id="HuggingFaceTB/SmolVLM2-256M-Video-Instruct",
    ),
    Alias(
        "smolvlm2-500m",
        "smolvlm",
        "SmolVLM2-500M-Video-Instruct, sees pictures and videos",
        hub_id="HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    ),
    Alias(
        "smolvlm2-2.2b",
        "smolvlm",
        "SmolVLM2-2.2B-Instruct, sees pictures and videos",
        hub_id="HuggingFaceTB/SmolVLM2-2.2B-Instruct",
    ),
    Alias(
        "smolvlm-256m",
        "smolvlm",
        "SmolVLM-256M-Instruct, sees pictures",
        hub_id="HuggingFaceTB/SmolVLM-256M-Instruct",
    ),
    Alias(
        "smolvlm-500m",
        "smolvlm",
        "SmolVLM-500M-Instruct, sees pictures",
        hub_id="HuggingFaceTB/SmolVLM-500M-Instruct",
    ),
    Alias(
        "idefics3-8b",
        "smolvlm",
        "Idefics3-8B with Llama 3.1, sees pictures",
        hub_id="HuggingFaceM4/Idefics3-8B-Llama3",
    ),
    Alias(
        "smollm2-135m",
        "llama",
        "SmolLM2-135M-Instruct, text only",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    Alias(
        "smollm2-360m",
        "llama",
        "SmolLM2-360M-Instruct, text only",
        hub_id="HuggingFaceTB/SmolLM2-360M-Instruct",
    ),
    Alias(
        "smollm2-1.7b",
        "llama",
        "SmolLM2-1.7B-Instruct, text only",
        hub_id="HuggingFaceTB/SmolLM2-1.7B-Instruct",
    ),
    Alias(
        "qwen2.5-0.5b",
        "llama",
        "Qwen2.5-0.5B-Instruct, text only",
        hub_id="Qwen/Qwen2.5-0.5B-Instruct",
    ),
    Alias("qwen3-0.6b", "llama", "Qwen3-0.6B, text only", hub_id="Qwen/Qwen3-0.6B"),
    Alias("qwen3-1.7b", "llama", "Qwen3-1.7B, text only", hub_id="Qwen/Qwen3-1.7B"),
    Alias("qwen3-4b", "llama", "Qwen3-4B, text only", hub_id="Qwen/Qwen3-4B"),
    Alias("qwen3-8b", "llama", "Qwen3-8B, text only", hub_id="Qwen/Qwen3-8B"),
    Alias(
        "tinyllama-1.1b",
        "llama",
        "TinyLlama-1.1B-Chat, text only",
        hub_id="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    ),
)


def find_alias(name: str) -> Alias | None:
    """The alias of that name, or None."""
    return next((a for a in ALIASES if a.name == name), None)


def is_hub_id(name: str) -> bool:
    """Whether a hub could have something of this name, which no file or folder here has."""
    return not exists(name) and not name.startswith(".") and _HUB_ID.fullmatch(name) is not None


def check_known(model: str) -> None:
    """OptionError for what is no alias, no folder and no id that a hub could have, and for a tiny model that is not
    installed; nothing is opened."""
    alias = find_alias(model)
    if alias is not None and alias.bundled:
        tiny_model(alias.bundled)
    if alias is not None or is_folder(model):
        return
    if exists(model):
        raise OptionError(f"{model} is a file; give the folder that holds config.json and the weights")
    if not is_hub_id(model):
        raise unknown_model(model)


def unknown_model(name: str) -> OptionError:
    """The error for a model that is no alias, folder or hub id; names the nearest aliases."""
    names = [a.name for a in ALIASES]
    near = (
        difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        or [n for n in names if name and name in n][:3]
    )
    hint = f"did you mean {' or '.join(near)}?" if near else f"aliases are {', '.join(names)}"
    return OptionError(f"unknown model {name!r:.200}: no alias, folder or hub id; {hint}")
