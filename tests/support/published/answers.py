"""What transformers answers, loaded from a folder by its own classes: nothing of vlmexport has a part in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from PIL.Image import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
    Qwen3VLProcessor,
    SmolVLMProcessor,
)
from transformers.models.smolvlm import processing_smolvlm

from tests.support import lfm2_processor
from tests.support.internvl_processor import processor_of
from tests.support.published.folders import floats_of


@dataclass(frozen=True)
class Request:
    """Pictures, and a text or a conversation; messages hold parts, and strings where the model reads text alone."""

    pictures: tuple[Image, ...] = ()
    prompt: str | list[dict[str, Any]] = ""


def _of_pictures(kind: Any) -> Any:
    """A processor of pictures and videos without that of videos, which needs torchvision."""

    class OfPictures(kind):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """As transformers', of what there is."""
            if argument_name == "video_processor":
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

    return OfPictures


OF_PICTURES = {
    "qwen2_vl": _of_pictures(Qwen2VLProcessor),
    "qwen2_5_vl": _of_pictures(Qwen2_5_VLProcessor),
    **dict.fromkeys(("qwen3_vl", "qwen3_5"), _of_pictures(Qwen3VLProcessor)),
}
IN_TILES = _of_pictures(SmolVLMProcessor)
"""It also wants a package that writes the numbers of frames in words."""


class Transformers:
    """The model of a folder in float32, with its own processor or tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = getattr(transformers, self.config.architectures[0])
        options = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
        self.model = kind.from_pretrained(floats_of(folder), **options).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.processor = _processor(folder, self.config, self.tokenizer)

    @property
    def chat_template(self) -> Any:
        """Of the processor, where there is one, else the tokenizer's."""
        return getattr(self.processor or self.tokenizer, "chat_template", None)

    def inputs(self, request: Request) -> dict[str, torch.Tensor]:
        """Arguments of the model's `generate`."""
        pictures: Any = list(request.pictures) or None
        if self.config.model_type == "vision-encoder-decoder":
            return self._caption(pictures, str(request.prompt))
        if not isinstance(request.prompt, str):
            owner = self.processor or self.tokenizer
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            return dict(owner.apply_chat_template(shown(request), tokenize=True, **options))
        if self.processor is None:
            return dict(self.tokenizer(request.prompt, return_tensors="pt"))
        return dict(self.processor(images=pictures, text=request.prompt, return_tensors="pt"))

    def _caption(self, pictures: Any, prompt: str) -> dict[str, torch.Tensor]:
        """The decoder starts with the prompt."""
        found = dict(self.processor(images=pictures, return_tensors="pt"))
        words = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        start = self.model.generation_config.decoder_start_token_id
        return found | {"decoder_input_ids": torch.tensor([[start, *words]])}


def _processor(folder: Path, config: Any, tokenizer: Any) -> Any:
    """None for a model of text."""
    options = {"local_files_only": True, "backend": "pil"}
    if config.model_type == "vision-encoder-decoder":
        return AutoImageProcessor.from_pretrained(folder, **options)
    if not hasattr(config, "vision_config"):
        return None
    if config.model_type in OF_PICTURES:
        kind = OF_PICTURES[config.model_type]
        template = kind.get_processor_dict(folder)[0].get("chat_template")
        images = AutoImageProcessor.from_pretrained(folder, **options)
        return kind(images, tokenizer, None, chat_template=template or tokenizer.chat_template)
    if config.model_type == "internvl":
        return processor_of(folder)
    if config.model_type == "lfm2_vl":
        return lfm2_processor.processor_of(folder)
    if config.model_type == "smolvlm":
        described = SmolVLMProcessor.get_processor_dict(folder)[0]
        images = AutoImageProcessor.from_pretrained(folder, **options)
        with mock.patch.object(processing_smolvlm, "num2words", str):
            return IN_TILES(
                images, tokenizer, SimpleNamespace(num_frames=64, fps=1), described["image_seq_len"],
                described.get("chat_template"),
            )  # fmt: skip
    processor = AutoProcessor.from_pretrained(folder, **options)
    # Processors of older releases leave these to the configuration; transformers warns, and asks its users to set them.
    if hasattr(config, "vision_feature_select_strategy"):
        if processor.patch_size is None:
            processor.patch_size = config.vision_config.patch_size
        if processor.vision_feature_select_strategy is None:
            processor.vision_feature_select_strategy = config.vision_feature_select_strategy
        if (
            not processor.num_additional_image_tokens
            and config.vision_config.model_type == "clip_vision_model"
        ):
            processor.num_additional_image_tokens = 1
    if getattr(processor, "num_query_tokens", 0) is None:
        processor.num_query_tokens = config.num_query_tokens
    return processor


def shown(request: Request) -> list[dict[str, Any]]:
    """The messages with the pictures in their parts, where transformers looks for them."""
    left = list(request.pictures)
    found = []
    for turn in request.prompt:
        assert isinstance(turn, dict)
        content = turn["content"]
        if not isinstance(content, str):
            content = [part | {"image": left.pop(0)} if part["type"] == "image" else part for part in content]
        found.append(turn | {"content": content})
    return found


def messages(turns: Sequence[str], pictures: int = 0, *, parts: bool) -> list[dict[str, Any]]:
    """Turns of user and assistant; `pictures` stand in the first. `parts`: content as parts, else strings."""
    found: list[dict[str, Any]] = []
    for number, text in enumerate(turns):
        content: Any = [{"type": "text", "text": text}] if parts else text
        if number == 0 and parts:
            content = [{"type": "image"}] * pictures + content
        found.append({"role": "user" if number % 2 == 0 else "assistant", "content": content})
    return found
