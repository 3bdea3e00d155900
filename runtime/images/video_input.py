"""A video of a request: its frames, and how fast they follow each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..common.validation import check_colour_order, number

SLOWEST, FASTEST = 1e-4, 1000.0
"""Frames per second: one in three hours, and a rate above which it is a mistake."""


@dataclass(frozen=True)
class Video:
    """A video for a request: see `images/video.py` for `frames`.

    `fps` is the rate at which they were taken, frames per second; a file knows its own. `sample_fps` is the rate at
    which the model sees them, by default its own (2 for Qwen2.5-VL). `channels` is the order of the colours of frames
    that are arrays, "rgb" or "bgr" (OpenCV); that of a request is given beside it.

    Raises `OptionError` for a rate or an order that is none.
    """

    frames: Any
    fps: float | None = None
    sample_fps: float | None = None
    channels: str = "rgb"

    def __post_init__(self) -> None:
        for name in ("fps", "sample_fps"):
            if getattr(self, name) is not None:
                rate = number(f"Video: {name} (frames a second)", getattr(self, name), SLOWEST, FASTEST)
                object.__setattr__(self, name, rate)
        check_colour_order("Video: channels", self.channels)
