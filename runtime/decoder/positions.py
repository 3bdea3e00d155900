"""Positions of rows that a prompt gives, and of those behind it."""

from __future__ import annotations

import numpy as np


def next_position(positions: np.ndarray) -> int:
    """Where text goes on behind rows with `positions` int64 [axes, n] (n ≥ 1).

    Behind text one further. Behind a picture or video after its longer side; time, the first of three axes, does not
    count, and may have run ahead of the text that follows a slow video (transformers' `get_rope_index`).
    """
    return int(positions[-2:, -1].max()) + 1
