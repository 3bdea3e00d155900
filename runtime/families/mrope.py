"""Positions with three axes, time, row and column (M-RoPE; Qwen2-VL, arXiv 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    """The embeddings of one picture or video in a prompt: where they start, how many of them there are in time, down and
    across, and how far apart two time steps are."""

    start: int
    frames: int
    down: int
    across: int
    interval: float = 1.0

    @property
    def length(self) -> int:
        """How many embeddings."""
        return self.frames * self.down * self.across


def positions(count: int, spans: Sequence[Span]) -> np.ndarray:
    """int64 [3, count]: text counts on all axes alike; a picture's embeddings have their place in it; the text behind
    goes on after its longer side. As transformers' `Qwen2_5_VLModel.get_rope_index`."""
    position_ids, now, done = np.empty((3, count), np.int64), 0, 0
    for span in spans:
        text = span.start - done
        position_ids[:, done : span.start] = now + np.arange(text)
        now, done = now + text, span.start + span.length
        times = (np.arange(span.frames) * np.float32(span.interval)).astype(np.int64)
        axes = np.meshgrid(times, np.arange(span.down), np.arange(span.across), indexing="ij")
        position_ids[:, span.start : done] = now + np.stack(axes).reshape(3, -1)
        now += max(span.down, span.across)
    position_ids[:, done:] = now + np.arange(count - done)
    return position_ids
