"""transformers' `InternVLProcessor` of a folder, without the part for videos, which needs torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer, InternVLProcessor


class OfPictures(InternVLProcessor):
    """See the module."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """As transformers', of what there is."""
        if argument_name == "video_processor":
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)


def processor_of(folder: Path) -> OfPictures:
    """With the settings and the template of the folder; pictures are read by Pillow."""
    described = InternVLProcessor.get_processor_dict(folder)[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    template = described.get("chat_template") or tokenizer.chat_template
    seats = described.get("image_seq_length", 256)
    return OfPictures(images, tokenizer, None, image_seq_length=seats, chat_template=template)
