"""Errors of what is added behind layers (DeepStack) and of the tower of Qwen3-VL that the contract suite must catch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.decoder.deepstack import DeepStack
from vlmexport.runtime.decoder.positions import Positions

Patch = pytest.MonkeyPatch


def _changed(patch: Patch, change: Any) -> None:
    adding = DeepStack.adding
    patch.setattr(DeepStack, "adding", lambda self, embeds: adding(self, change(self, embeds)))


def nothing_added(patch: Patch) -> None:
    """Pictures enter before layer 0 alone."""
    _changed(patch, lambda self, embeds: embeds * 0)


def swapped_layers(patch: Patch) -> None:
    """What belongs behind one layer is added behind another."""
    _changed(patch, lambda self, embeds: np.roll(embeds, self._size, -1))


def never_cleared(patch: Patch) -> None:
    """What a prompt added is added to the tokens behind it, too."""
    patch.setattr(DeepStack, "clear", lambda self: None)


def one_axis(patch: Patch) -> None:
    """Rows and columns of a picture count as text does."""
    write = Positions.write_prompt

    def wrong(self: Any, forward_pass: Any, start: int, positions: np.ndarray | None) -> None:
        write(self, forward_pass, start, None if positions is None else positions[:1].repeat(3, 0))

    patch.setattr(Positions, "write_prompt", wrong)
