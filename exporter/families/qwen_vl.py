"""What the Qwen-VL families share: pictures of any size and videos in the prompt of a language model with M-RoPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ...runtime.families.base import image_list
from ...runtime.families.qwen_vl import written
from ...runtime.images.video import Video
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.parts import Parts, ReferencePrompt
from .common.prompt_text import marked_text, replaced_marks, tokenized
from .languages import language_for
from .vision.packed import PackedVision

Tensors = dict[str, torch.Tensor]


class QwenVLFamily(Family):
    """A family of `tower` and the language model of its text configuration."""

    tower: ClassVar[type[PackedVision]]

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.language = language_for(checkpoint, self.config.text_config, "")
        self.vision: PackedVision = self.tower(checkpoint, self.language.decoder.hidden_size)

    # --- what a family says ---

    def watched(self, videos: Sequence[Video]) -> tuple[Tensors, list[str]]:
        """(what the tower takes of videos, what each becomes in the text), as the model's own processor has it."""
        raise NotImplementedError

    def positions(self, input_ids: torch.Tensor, vision: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """int64 [3, 1, n] of a prompt, by the model's own `get_rope_index`."""
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        sizes = {name: vision[name] for name in names if name in vision}
        found, _ = self.vision.model.model.get_rope_index(
            input_ids, **self.forward_arguments(input_ids), **sizes
        )
        return found

    def video_steps(self, vision: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
        """Time steps of each video's run of embeddings; see `ReferencePrompt`."""
        return tuple(vision["video_grid_thw"][:, 0].tolist()) if "video_grid_thw" in vision else ()

    # --- what follows ---

    @property
    def image_token_id(self) -> int:
        """`<|image_pad|>`."""
        return self.config.image_token_id

    @property
    def video_token_id(self) -> int:
        """`<|video_pad|>`."""
        return self.config.video_token_id

    def parts(self, model: Any) -> Parts:
        """See `Family`."""
        return replace(super().parts(model), rotary=model.model.language_model.rotary_emb)

    def forward_arguments(self, input_ids: torch.Tensor, prompts: Sequence[slice] = ()) -> Tensors:
        """What stands for a picture (1) or a video (2)."""
        return {
            "mm_token_type_ids": (input_ids == self.image_token_id).long()
            + 2 * (input_ids == self.video_token_id).long()
        }

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """As the model's own processor, which needs torchvision for the videos that it reads too: the image processor, the
        chat template, `<|image_pad|>` repeated for every embedding of a picture, `<|video_pad|>` for every embedding of a
        video."""
        given = image_list(image)
        videos = [each for each in given if isinstance(each, Video)]
        images = [each for each in given if not isinstance(each, Video)]
        marks = self.checkpoint.tokenizer.convert_ids_to_tokens([self.image_token_id, self.video_token_id])
        kinds = ["video" if isinstance(each, Video) else "image" for each in given]
        text, surrounded = marked_text(self, prompt, kinds, written(*marks))
        if not given:
            return ReferencePrompt(tuple(tokenized(self, text, surrounded)))
        vision = self._seen(images)
        seen, texts = self.watched(videos) if videos else ({}, [])
        vision |= seen
        pictures = self._counts(vision, "image_grid_thw")
        replaced = replaced_marks(text, {marks[0]: (marks[0] * n for n in pictures), marks[1]: texts})
        input_ids = tokenized(self, replaced, surrounded)
        positions = self.positions(torch.tensor([input_ids]), vision)
        steps = self.video_steps(vision)
        return ReferencePrompt(tuple(input_ids), vision, positions=positions[:, 0], video_steps=steps)

    def _seen(self, images: Sequence[Any]) -> Tensors:
        """What the tower takes of pictures."""
        if not images:
            return {}
        described = self.vision.settings()
        size = {"shortest_edge": described["min_pixels"], "longest_edge": described["max_pixels"]}
        return self.patches(images, size=size)

    def _counts(self, vision: Mapping[str, torch.Tensor], grid: str) -> Iterator[int]:
        """Embeddings of each picture or video."""
        sizes = vision[grid].prod(-1) // self.vision.grid.patches if grid in vision else torch.zeros(0)
        return iter(sizes.tolist())

    def patches(self, pictures: Sequence[Any], **options: Any) -> Tensors:
        """`pixel_values` and `image_grid_thw` by the image processor."""
        return dict(self.checkpoint.image_processor(images=list(pictures), return_tensors="pt", **options))

    def moving(self, stills: torch.Tensor, patches: int) -> torch.Tensor:
        """Patches [n, values] of a video whose frames, in whole groups, were each read as a still picture of so many
        `patches`: a patch holds the pixels of a group of frames."""
        grid = self.vision.grid
        group = grid.temporal_patch_size
        still = stills.reshape(-1, group, patches, 3, group, grid.patch_size**2)
        moving = torch.stack([still[:, frame, :, :, frame] for frame in range(group)], 3)
        return moving.reshape(-1, grid.patch_values)
