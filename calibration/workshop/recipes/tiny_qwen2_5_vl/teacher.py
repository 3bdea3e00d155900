"""What the tower learns to say: the rows of the image tower of ``tiny-vit-gpt2``, each direction of them equally loud.

That tower learned beside readers with attention, and a decoder reads an object's kind and place off its rows; three
quarters of their variance is of eight directions, which say little about objects. Rows are centred, turned to their
principal directions and scaled to about one in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...scenes.dataset import resized
from ...scenes.scene import TRAIN, Scene, sample_scene
from ..common.folder import digest
from ..tiny_vit_gpt2.captioner import ViTGPT2
from .tower import ROWS, WIDTH

SAMPLE = 1000  # scenes whose rows say what is centred and scaled
QUIET = 0.02  # variance below which a direction counts as noise; the loudest has 36, the 64th 0.09


class Teacher:
    """The tower of a `tiny-vit-gpt2` folder, with the directions of its rows.

    Attributes:
        digest: names the weights. side: of the pictures that it takes, pixels.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.digest = digest(folder / "model.safetensors")
        self._tower = ViTGPT2.open(folder)
        self.side = self._tower.side
        known = self._raw([sample_scene(seed, index) for index in TRAIN[:SAMPLE]]).flatten(0, 1).double()
        mean = known.mean(0)
        variance, directions = torch.linalg.eigh((known - mean).T @ (known - mean) / len(known))
        self._mean = mean.float()
        self._turn = (directions * (variance + QUIET).rsqrt()).float()

    def rows(self, pictures: np.ndarray) -> Tensor:
        """Rows float32 [B, 64, width] of uint8 pictures (B, side, side, 3), in reading order."""
        found = self._tower.rows(pictures)[:, 1:]  # the first is the class token's
        assert found.shape[1:] == (ROWS, WIDTH), found.shape
        return (found - self._mean) @ self._turn

    def _raw(self, scenes: Sequence[Scene]) -> Tensor:
        return self._tower.rows(np.stack([resized(scene, self.side) for scene in scenes]))[:, 1:]
