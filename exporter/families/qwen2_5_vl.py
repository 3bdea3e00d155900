"""Qwen2.5-VL: pictures of any size in the prompt of a Qwen2 with M-RoPE (Bai et al., arXiv 2502.13923)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...runtime.errors import InputError
from ...runtime.families.base import image_list
from ...runtime.families.chat import placed
from ...runtime.families.qwen2_5_vl import written
from ..checkpoint.load import Checkpoint
from .base import Family, Parts, ReferencePrompt
from .languages import language_for
from .vision.qwen2_5 import Qwen2_5Vision


class Qwen2_5_VLFamily(Family):
    """Exports Qwen2_5_VLForConditionalGeneration."""

    name: ClassVar[str] = "qwen2.5-vl"
    architectures: ClassVar[tuple[str, ...]] = ("Qwen2_5_VLForConditionalGeneration",)
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = language_for(checkpoint, self.config.text_config, "")
        self.vision: Qwen2_5Vision = Qwen2_5Vision(checkpoint, self.language.decoder.hidden_size)

    @property
    def image_token_id(self) -> int:
        """`<|image_pad|>`."""
        return self.config.image_token_id

    def parts(self, model: Any) -> Parts:
        """See `Family`."""
        return replace(super().parts(model), rotary=model.model.language_model.rotary_emb)

    def forward_arguments(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What stands for a picture (1) or a video (2)."""
        kinds = (input_ids == self.image_token_id).long() + 2 * (
            input_ids == self.config.video_token_id
        ).long()
        return {"mm_token_type_ids": kinds}

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """As `Qwen2_5_VLProcessor`, which needs torchvision for the videos that it reads too: the image processor, the
        chat template, `<|image_pad|>` repeated for every row of a picture."""
        checkpoint, images = self.checkpoint, image_list(image)
        tokenizer = checkpoint.tokenizer
        marks = tokenizer.convert_ids_to_tokens([self.image_token_id, self.config.video_token_id])
        turns = placed(prompt or "", ["image"] * len(images), self.chat_template, written(*marks))
        if not isinstance(turns, str):
            text = tokenizer.apply_chat_template(
                turns, chat_template=self.chat_template, add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(turns)["input_ids"]
        if not ids:
            raise InputError("the prompt has no tokens; write some text")
        if not images:
            return ReferencePrompt(tuple(ids))
        described = self.vision.settings()
        size = {"shortest_edge": described["min_pixels"], "longest_edge": described["max_pixels"]}
        vision = dict(checkpoint.image_processor(images=images, size=size, return_tensors="pt"))
        rows = iter((vision["image_grid_thw"].prod(-1) // self.vision.grid.patches).tolist())
        whole = [i for token in ids for i in [token] * (next(rows) if token == self.image_token_id else 1)]
        found = torch.tensor([whole])
        arguments = {**self.forward_arguments(found), "image_grid_thw": vision["image_grid_thw"]}
        positions, _ = self.vision.model.model.get_rope_index(found, **arguments)
        return ReferencePrompt(tuple(whole), vision, positions=positions[:, 0])
