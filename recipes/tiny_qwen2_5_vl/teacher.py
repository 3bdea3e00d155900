"""What the tower learns to say: the rows of the image tower of ``tiny-vit-gpt2``.

That tower learned beside readers with attention, and a decoder reads an object's kind and place off its rows. Three
quarters of their variance is of eight directions, which say little about objects; so they are learned centred, turned to
their principal directions and scaled to about one in each. The decoder gets them as they were, which it reads sooner.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.data.scenes.scene import TRAIN

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
        shown = np.stack([model_picture(seed, index, self.side) for index in TRAIN[:SAMPLE]])
        known = self._plain(shown).flatten(0, 1).double()
        mean = known.mean(0)
        variance, directions = torch.linalg.eigh((known - mean).T @ (known - mean) / len(known))
        self._mean = mean.float()
        self._turn = (directions * (variance + QUIET).rsqrt()).float()

    def rows(self, pictures: np.ndarray) -> Tensor:
        """What is learned: rows float32 [B, 64, width] of uint8 pictures (B, side, side, 3), in reading order."""
        return (self._plain(pictures) - self._mean) @ self._turn

    @torch.no_grad()
    def turn_back(self, layer: nn.Linear) -> None:
        """Lets the last layer of a tower, which gives what `rows` does, give the rows as they were."""
        back = torch.linalg.inv(self._turn.double())
        weight, bias = layer.weight.double(), layer.bias.double()
        layer.weight.copy_(back.T @ weight)
        layer.bias.copy_(bias @ back + self._mean.double())

    def _plain(self, pictures: np.ndarray) -> Tensor:
        hidden_states = self._tower.rows(pictures)[:, 1:]  # the first is the class token's
        assert hidden_states.shape[1:] == (ROWS, WIDTH), hidden_states.shape
        return hidden_states
