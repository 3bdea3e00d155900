"""Where the tokens of whole texts stand, for drafts that are given a target's positions with three axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...exporter.families.common.base import Family
from ...exporter.families.common.parts import ReferencePrompt
from ...runtime.decoder.positions import positions_of_slots

AXES = 3
"""Of M-RoPE: time, height and width."""


def has_axes(family: Family) -> bool:
    """Whether the positions of this family's texts have three axes."""
    return family.decoder.position == "mrope"


def positions_of(
    family: Family, prompts: Sequence[ReferencePrompt], lengths: Sequence[int], device: torch.device
) -> Tensor | None:
    """int64 [3, B, T], on `device`, of so many tokens of each text, its prompt's first; zero behind its end. None for other
    families."""
    if not has_axes(family):
        return None
    found = np.zeros((AXES, len(lengths), max(lengths)), np.int64)
    for b, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        known = None if prompt.positions is None else prompt.positions.numpy()
        found[:, b, :length] = positions_of_slots(known, np.arange(length))
    return torch.from_numpy(found).to(device)
