"""transformers' image processor and processor of LFM2-VL with Pillow in the place of torchvision, which is not here: sizes,
tiles, patches, padding and text are their own."""

from __future__ import annotations

import functools
import importlib
import json
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from transformers import AutoTokenizer, BatchFeature
from transformers.image_processing_backends import TorchvisionBackend
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

LEFT_OUT = (
    "image_processor_type", "processor_class", "resample", "size", "do_resize", "do_rescale", "do_normalize", "do_pad",
    "return_row_col_info", "max_num_patches",
)  # fmt: skip


def _resize(self: Any, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
    pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in image]
    sized = [np.array(each.resize((size.width, size.height), resample)) for each in pictures]
    return torch.from_numpy(np.stack(sized)).permute(0, 3, 1, 2)


def _normalize(self: Any, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    return (image - mean[:, None, None]) / std[:, None, None]


@contextmanager
def on_pillow() -> Iterator[None]:
    """What the class asks torchvision for, of Pillow."""
    with (
        mock.patch.object(TorchvisionBackend, "resize", _resize),
        mock.patch.object(TorchvisionBackend, "normalize", _normalize),
    ):
        yield


@functools.cache
def image_processor() -> Any:
    """transformers' image processor, without what its constructor asks for."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    functional = modules[f"{names[2]}.functional"] = types.ModuleType(f"{names[2]}.functional")
    modules[names[2]].functional = functional
    with mock.patch.dict(sys.modules, modules):
        made = importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    return object.__new__(made.Lfm2VlImageProcessor)


def processed(pictures: list[np.ndarray], settings: dict[str, Any]) -> dict[str, Any]:
    """Of pictures uint8 [H, W, 3], with rows, columns and sizes."""
    defaults = {
        "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True,
        "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512,
        "max_pixels_tolerance": 2.0,
    }  # fmt: skip
    known = {name: value for name, value in (defaults | settings).items() if name not in LEFT_OUT}
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    with on_pillow():
        return image_processor()._preprocess(
            [torch.from_numpy(picture).permute(2, 0, 1) for picture in pictures], do_resize=True,
            resample=Image.Resampling.BILINEAR, do_rescale=True, do_normalize=True, do_pad=True,
            return_row_col_info=True, return_tensors="pt", disable_grouping=None, **known,
        )  # fmt: skip


class _Images:
    """What `Lfm2VlProcessor` asks of its image processor."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.use_thumbnail = settings.get("use_thumbnail", True)
        self.tile_size = settings.get("tile_size", 512)
        self.downsample_factor = settings.get("downsample_factor", 2)
        self.encoder_patch_size = settings.get("encoder_patch_size", 16)
        self.model_input_names = ["pixel_values", "pixel_attention_mask", "spatial_shapes"]

    def fetch_images(self, images: Any) -> Any:
        return images

    def __call__(self, images: Any, **_: Any) -> BatchFeature:
        flat = [picture for each in images for picture in (each if isinstance(each, list) else [each])]
        pictures = [np.array(picture.convert("RGB")) for picture in flat]
        return BatchFeature(dict(processed(pictures, self._settings)))


class OfPictures(Lfm2VlProcessor):
    """See the module."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """As transformers', of what there is."""
        if argument_name == "image_processor":
            return type(argument)
        return super().check_argument_for_proper_class(argument_name, argument)


def processor_of(folder: Path) -> OfPictures:
    """With the settings and the template of the folder."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    template = (folder / "chat_template.jinja").read_text()
    return OfPictures(_Images(settings), tokenizer, chat_template=template)
