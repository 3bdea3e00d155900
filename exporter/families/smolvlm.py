"""SmolVLM and Idefics 3: SigLIP's rows of tiles and frames anywhere in the prompt of a Llama (arXiv 2408.12637, 2504.05299)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
from transformers.models.smolvlm.processing_smolvlm import (
    DEFAULT_CHAT_TEMPLATE,
    DEFAULT_MEDIA_OUTTRO,
    DEFAULT_VIDEO_INTRO,
    FRAME_TIMESTAMP_MESSAGE,
    get_image_prompt_string,
)
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

from ...runtime.common.errors import InputError, UnsupportedModelError
from ...runtime.families.base import image_list
from ...runtime.families.smolvlm import AROUND, GLOBAL, VIDEO, media
from ...runtime.images.video import Video, open_video
from ...runtime.text.numbers import in_words
from ..checkpoint.checkpoint import Checkpoint
from .common.base import Family
from .common.config_checks import check_language_model
from .common.parts import ReferencePrompt
from .common.prompt_text import marked_text, marks_in, replaced_marks, tokenized
from .languages.llama import LlamaLanguage
from .vision.idefics3 import Idefics3Vision


class SmolVLMFamily(Family):
    """Exports SmolVLMForConditionalGeneration and Idefics3ForConditionalGeneration of SigLIP and Llama."""

    name: ClassVar[str] = "smolvlm"
    architectures: ClassVar[tuple[str, ...]] = (
        "SmolVLMForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
    )
    model_types: ClassVar[tuple[str, ...]] = ("smolvlm", "idefics3")

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = self.config.text_config
        check_language_model(config, checkpoint.architecture, ["llama"])
        self.language = LlamaLanguage(checkpoint, config, "", "model.text_model.")
        self.vision: Idefics3Vision = Idefics3Vision(checkpoint, self.language.decoder.hidden_size)

    @property
    def image_token_id(self) -> int:
        """`<image>`."""
        return self.config.image_token_id

    @property
    def video_token_id(self) -> int | None:
        """`<image>`, too."""
        return None if self.vision.settings().get("video") is None else self.image_token_id

    @property
    def chat_template(self) -> str | None:
        """See `Family`; one with a branch for videos where the model reads them."""
        own = super().chat_template
        if own is None or self.video_token_id is None or own == DEFAULT_CHAT_TEMPLATE:
            return own
        return with_videos(own)

    def text(self) -> dict[str, Any]:
        """See `Family`. Raises UnsupportedModelError for a processor that writes other tokens."""
        tokenizer = self.checkpoint.tokenizer
        names = {"fake_image_token": AROUND, "global_image_token": GLOBAL, "video_token": VIDEO}
        names["image_token"] = "<image>"
        for name, known in names.items():
            if (token := getattr(tokenizer, name, None) or known) != known:
                raise UnsupportedModelError(
                    f"the tokenizer's {name}={token!r:.80} is not supported, only {known!r}"
                )
        if tokenizer.convert_tokens_to_ids("<image>") != self.image_token_id:
            raise UnsupportedModelError(
                f"config.json: image_token_id={self.image_token_id} is not the tokenizer's '<image>'"
            )
        count = self.checkpoint.processor_settings.get("image_seq_len", self.vision.tile_embeds)
        if count != self.vision.tile_embeds:
            raise UnsupportedModelError(
                f"processor_config.json: image_seq_len={count!r:.40} differs from the {self.vision.tile_embeds} rows of a tile"
            )
        return super().text()

    def reference_prompt(self, image: Any, prompt: Any) -> ReferencePrompt:
        """As `SmolVLMProcessor`, which needs torchvision and num2words for the videos that it reads too: the image processor,
        the chat template, and the text of each picture and video in place of its mark."""
        given = image_list(image)
        kinds = ["video" if isinstance(each, Video) else "image" for each in given]
        if self.video_token_id is None and "video" in kinds:
            raise InputError("this model reads no videos: give the frames as pictures")
        known = media("<image>", self.video_token_id is not None)
        text, surrounded = marked_text(self, prompt, kinds, known)
        seen: dict[str, list[tuple[str, torch.Tensor]]] = {medium.mark: [] for medium in known.values()}
        for each, kind in zip(given, kinds, strict=True):
            made = self._watched(each) if isinstance(each, Video) else self._seen(each)
            seen[known[kind].mark].append(made)
        marks = marks_in(text, seen)
        if any(marks.count(mark) != len(each) for mark, each in seen.items()):
            raise InputError(f"the prompt has marks of {marks}, and {kinds} were given: one for each")
        whole = replaced_marks(text, {mark: [words for words, _ in each] for mark, each in seen.items()})
        ids = tokenized(self, whole, surrounded)
        if not given:
            return ReferencePrompt(tuple(ids))
        pixels = {mark: iter([tiles for _, tiles in each]) for mark, each in seen.items()}
        return ReferencePrompt(
            tuple(ids), {"pixel_values": torch.cat([next(pixels[mark]) for mark in marks])}
        )

    def _seen(self, picture: Any) -> tuple[str, torch.Tensor]:
        """(text, `pixel_values` [tiles, 1, 3, side, side]) of a picture."""
        size = {"longest_edge": self.vision.splitting.longest}
        made = self.checkpoint.image_processor(
            images=[[picture]], size=size, return_row_col_info=True, return_tensors="pt"
        )
        return self._text(made["rows"][0][0], made["cols"][0][0]), made["pixel_values"][0][:, None]

    def _watched(self, video: Video) -> tuple[str, torch.Tensor]:
        """(text, `pixel_values` [frames, 1, 3, side, side]) of a video, whose frames the processor of pictures reads."""
        info, clip = self.vision.settings()["video"], open_video(video)
        if clip.fps is None:
            raise InputError(f"{clip.name}: nobody knows its rate; give Video(frames, fps=...)")
        about = VideoMetadata(clip.count, clip.fps, duration=clip.count / clip.fps)
        sample: Any = SmolVLMVideoProcessor.sample_frames
        chosen = sample(None, about, info["max_frames"], video.sample_fps or info["fps"]).tolist()
        about.frames_indices = chosen
        made = self.checkpoint.image_processor(
            images=[clip.read(chosen)],
            size={"longest_edge": info["longest_edge"]},
            do_image_splitting=False,
            return_tensors="pt",
        )
        assert about.duration is not None
        duration = str(timedelta(seconds=int(about.duration)))
        text = DEFAULT_VIDEO_INTRO.format(frame_count=in_words(len(chosen)), video_duration=duration)
        for second in about.timestamps:
            stamp = f"{int(second // 60):02d}:{int(second % 60):02d}"
            text += FRAME_TIMESTAMP_MESSAGE.format(timestamp=stamp) + self._text(0, 0)
        return text + DEFAULT_MEDIA_OUTTRO, made["pixel_values"][0][:, None]

    def _text(self, down: int, across: int) -> str:
        return get_image_prompt_string(
            down, across, self.vision.tile_embeds,
            fake_token_around_image=AROUND, image_token="<image>", global_image_token=GLOBAL,
        )  # fmt: skip


def with_videos(own: str) -> str:
    """A chat template that is `own` but for conversations with a video: `SmolVLMProcessor` lays those out by another."""
    seen = (
        "{% set seen = namespace(video=false) %}{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'video' %}{% set seen.video = true %}{% endif %}{% endfor %}{% endfor %}"
    )
    # A line end behind a block, and the last one of a template, are not written.
    return f"{seen}{{% if seen.video %}}{DEFAULT_CHAT_TEMPLATE}{{% else %}}{{{{ '' }}}}{own.removesuffix(chr(10))}{{% endif %}}"
