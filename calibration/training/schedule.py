"""The rate of learning and the records of each step: functions of the step alone."""

from __future__ import annotations

import math

import numpy as np

from ..objectives.training_options import LoopOptions


def learning_rate(
    step: int, options: LoopOptions, peak: float | None = None, start: int = 0, end: int | None = None
) -> float:
    """0 before `start`, linear warm-up over `warmup` steps to `peak` (default: the run's), then half a cosine to 0 at
    step `end` (default: the last one), and 0 from there on."""
    peak = options.lr if peak is None else peak
    end = options.steps if end is None else end
    assert peak is not None
    if not start <= step < end:
        return 0.0
    warm = start + options.warmup
    if step < warm:
        return peak * (step - start + 1) / (options.warmup + 1)
    done = (step - warm) / max(1, end - warm)
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def batch_indices(step: int, size: int, options: LoopOptions) -> list[int]:
    """Records of one step: consecutive pieces of a shuffle per epoch, a function of (seed, step) alone."""
    count = min(options.batch_size, size)
    per_epoch = size // count
    epoch, piece = divmod(step, per_epoch)
    order = np.random.default_rng([options.seed, epoch]).permutation(size)
    return order[piece * count : (piece + 1) * count].tolist()
