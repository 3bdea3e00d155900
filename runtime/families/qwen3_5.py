"""Qwen3.5: prompts, pictures and videos as Qwen3-VL lays them out."""

from __future__ import annotations

from .qwen3_vl import Qwen3VL


class Qwen35(Qwen3VL):
    """Source of the layout: transformers `Qwen3VLProcessor`, which Qwen3.5 has too, and `Qwen3_5Model.get_rope_index`."""

    name = "qwen3.5"
