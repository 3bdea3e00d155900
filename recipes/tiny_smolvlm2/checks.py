"""What the tiles show: answers and captions with all of them, with the whole picture in one tile alone, and with the tiles of
another picture around the right whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vlmexport.calibration.data.scenes import answer_value, ask
from vlmexport.calibration.data.scenes.asking import Asked
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.data.scenes.scene import Scene, sample_scene

from ..common.checks import answered, by_type, described, share
from ..common.evaluation import facts
from .tiles import TILE_ROWS, TILED, WHOLE, Tiling

if TYPE_CHECKING:
    from .captioner import SmolVLM2

DETAILS = ("pattern", "striped", "left", "right", "exists", "colour", "size", "lane")
"""Questions about stripes, and those whose question or answer names a kind: what the whole picture's 32 pixels hardly show."""
COARSE = ("count", "table", "wall", "light")
"""The others."""
LEAST_GAIN = 0.10
"""By which a bundled model must answer more of `DETAILS` with the tiles than with the whole picture alone."""
VARIANTS = 200  # of a scene's questions, among which one of each group is looked for


class TileChecks:
    """A question about a detail of each scene and a coarse one, and the answers with these tiles or those.

    Args:
        captioner: encodes the pictures, once, and is asked. seed, indices: which scenes; two at least.
    """

    def __init__(self, captioner: SmolVLM2, seed: int, indices: Sequence[int]) -> None:
        self.captioner = captioner
        self.scenes = [sample_scene(seed, index) for index in indices]
        self.rows = captioner.rows(np.stack([model_picture(seed, i, captioner.side) for i in indices]))
        self.details = [asked_of(scene, DETAILS) for scene in self.scenes]
        self.coarse = [asked_of(scene, COARSE) for scene in self.scenes]

    def figures(self) -> dict[str, float]:
        """The short form, rounded, for a log."""
        return {
            "details": round(share(self.answers(self.details, TILED, self.rows)), 4),
            "details_whole": round(share(self.answers(self.details, WHOLE, self.rows)), 4),
        }

    def answers(self, asked: Sequence[Asked], shown: Tiling, rows: Tensor) -> dict[str, list[bool]]:
        """By type of question, which answers say the right thing; `rows` [N, 40, width] are all of a picture's."""
        captioner = self.captioner.answering(shown)
        return answered(captioner, rows[:, shown.stored], asked, answer_value)

    def with_other_tiles(self) -> Tensor:
        """Rows of the tiles of the next picture, and of the whole of this."""
        return torch.cat([self.rows.roll(-1, 0)[:, :-TILE_ROWS], self.rows[:, -TILE_ROWS:]], 1)


def asked_of(scene: Scene, kinds: Sequence[str]) -> Asked:
    """The first question about a scene that is of such a kind."""
    return next(asked for asked in (ask(scene, v) for v in range(VARIANTS)) if asked.kind in kinds)


def evaluate_tiles(captioner: SmolVLM2, seed: int, indices: Sequence[int]) -> dict[str, Any]:
    """Figures for an evaluation."""
    checks = TileChecks(captioner, seed, indices)
    tiled, whole = (checks.answers(checks.details, shown, checks.rows) for shown in (TILED, WHOLE))
    other = checks.answers(checks.details, TILED, checks.with_other_tiles())
    coarse, coarse_whole = (checks.answers(checks.coarse, shown, checks.rows) for shown in (TILED, WHOLE))
    alone = captioner.answering(WHOLE)
    texts = captioner.say(described(alone, checks.rows[:, WHOLE.stored], alone.caption_prompt()))
    return {
        "details": round(share(tiled), 4),
        "details_by_type": by_type(tiled),
        "details_whole": round(share(whole), 4),
        "details_whole_by_type": by_type(whole),
        "details_gain": round(share(tiled) - share(whole), 4),
        "details_other_tiles": round(share(other), 4),
        "coarse": round(share(coarse), 4),
        "coarse_whole": round(share(coarse_whole), 4),
        "facts_whole": facts(texts, checks.scenes),
    }
