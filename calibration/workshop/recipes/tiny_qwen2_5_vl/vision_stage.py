"""First stage: the tower learns what lies where, in both frames of a patch, through throw-away heads.

Every row answers for the object at its place, once for either frame: in a picture both are the same, in a film something
may have happened in between. The mean of all rows answers for the setting. The heads are dropped afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...precision import computing, dtype_of
from ...scenes.dataset import resized
from ...scenes.film import sample_film
from ...scenes.scene import MOST_OBJECTS, TRAIN, VALIDATION, Scene, sample_scene
from ..common.labels import GLOBAL_CLASSES, NONE, SLOT_CLASSES, accuracies, mirrored, scene_labels
from ..common.long_run import LongRun
from ..common.loop import Part, Schedule, run_steps
from .tower import FRAMES, SIDE, WIDTH, build_tower, encode, patches

CHECKED = 500  # validation pictures, and as many pairs of frames
ROW_CLASSES = SLOT_CLASSES | {"ordinal": MOST_OBJECTS + 1}
ONCE = ("table", "wall", "light")  # of both frames

View = tuple[np.ndarray, list[dict[str, np.ndarray]]]
"""Two frames, uint8 (2, side, side, 3), and the labels of each."""


class RowHeads(nn.Module):
    """Linear classifiers on rows; used in training only."""

    def __init__(self) -> None:
        super().__init__()
        rows = {f"{n}{f}": nn.Linear(WIDTH, c) for n, c in ROW_CLASSES.items() for f in range(FRAMES)}
        setting = {n: nn.Linear(WIDTH, GLOBAL_CLASSES[n]) for n in ONCE}
        setting |= {f"count{f}": nn.Linear(WIDTH, GLOBAL_CLASSES["count"]) for f in range(FRAMES)}
        self.row_heads, self.setting_heads = nn.ModuleDict(rows), nn.ModuleDict(setting)


def picture_view(seed: int, index: int, flip: bool) -> View:
    """A picture as both frames, perhaps mirrored."""
    scene = sample_scene(seed, index)
    picture, labels = resized(scene, SIDE), scene_labels(scene)
    if flip:
        picture, labels = picture[:, ::-1], mirrored(labels)
    return np.stack([picture] * FRAMES), [labels] * FRAMES


def film_view(seed: int, index: int, draw: int) -> View:
    """Two frames of a film that one patch shows; `draw` says which two."""
    frames = sample_film(seed, index).frames
    at = draw % (len(frames) // FRAMES) * FRAMES
    pair: Sequence[Scene] = frames[at : at + FRAMES]
    return np.stack([resized(scene, SIDE) for scene in pair]), [scene_labels(scene) for scene in pair]


def batch_of(views: Sequence[View]) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Patches [B, 256, 1176] and, for either frame, labels [B, ...] by name."""
    pixels = patches(np.stack([frames for frames, _ in views]))
    labels = [
        {name: torch.from_numpy(np.stack([found[f][name] for _, found in views])) for name in views[0][1][f]}
        for f in range(FRAMES)
    ]
    return pixels, labels


def row_loss(
    heads: RowHeads, rows: Tensor, labels: list[dict[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed cross entropies over both frames, and per question the answers' correctness (1, 0) or -1 for none."""
    loss, correct = rows.new_zeros((), dtype=torch.float32), {}
    mean = rows.mean(1)
    for frame, truths in enumerate(labels):
        owner = truths["owner"].flatten(1)
        for name in ROW_CLASSES:
            if name == "ordinal":
                truth = torch.where(owner >= 0, owner, MOST_OBJECTS)
            else:
                truth = truths[name].gather(1, owner.clamp_min(0)).masked_fill(owner < 0, NONE)
            found = heads.row_heads[f"{name}{frame}"](rows).float()
            loss = loss + F.cross_entropy(found.flatten(0, 1), truth.flatten(), ignore_index=NONE)
            correct[f"{name}{frame}"] = torch.where(truth == NONE, -1, (found.argmax(-1) == truth).long())
        for name in (*(ONCE if frame == 0 else ()), "count"):
            known = name if name in ONCE else f"{name}{frame}"
            found = heads.setting_heads[known](mean).float()
            loss = loss + F.cross_entropy(found, truths[name])
            correct[known] = (found.argmax(-1) == truths[name]).long()
    return loss, correct


@torch.no_grad()
def evaluate(tower: Any, heads: RowHeads, views: Sequence[View], dtype: torch.dtype) -> dict[str, float]:
    """Accuracy per question over all rows."""

    def answers(at: int) -> dict[str, Tensor]:
        pixels, labels = batch_of(views[at : at + 100])
        with computing(dtype):
            return row_loss(heads, encode(tower, pixels), labels)[1]

    return accuracies(map(answers, range(0, len(views), 100)))


def train_vision(
    work: Path,
    steps: int,
    scenes: int,
    pictures: int = 48,
    films: int = 16,
    lr: float = 3e-3,
    seed: int = 0,
    precision: str = "auto",
    stop_at: int | None = None,
    check_every: int = 250,
) -> int:
    """Runs or continues the stage; returns the step that was reached.

    `work` receives ``vision`` with ``state.pt`` and ``log.jsonl``. Every step draws its pictures anew.

    Args:
        scenes: the first so many of `train` are drawn. pictures, films: views of a step.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype = dtype_of(precision)
    settings = {
        "steps": steps,
        "scenes": scenes,
        "pictures": pictures,
        "films": films,
        "lr": lr,
        "seed": seed,
    }
    with LongRun(work / "vision", settings) as run:
        torch.manual_seed(seed)
        heads, tower = RowHeads(), build_tower(seed)
        modules = nn.ModuleDict({"tower": tower, "heads": heads})
        checks = {
            "picture": [picture_view(seed, i, False) for i in VALIDATION[:CHECKED]],
            "film": [film_view(seed, i, i) for i in VALIDATION[:CHECKED]],
        }

        def losses(step: int) -> Iterator[Part]:
            rng = np.random.default_rng([seed, 7, step])
            chosen = rng.integers(0, scenes, pictures + films)
            flips, draws = rng.random(pictures) < 0.5, rng.integers(0, 1 << 16, films)
            views = [picture_view(seed, TRAIN[i], f) for i, f in zip(chosen[:pictures], flips, strict=True)]
            views += [
                film_view(seed, TRAIN[i], int(d)) for i, d in zip(chosen[pictures:], draws, strict=True)
            ]
            pixels, labels = batch_of(views)
            with computing(dtype):
                yield {"rows": (1.0, row_loss(heads, encode(tower, pixels), labels)[0])}

        def check() -> dict[str, Any]:
            return {
                f"{kind}_{name}": value
                for kind, views in checks.items()
                for name, value in evaluate(tower, heads, views, dtype).items()
                if kind == "film" or not name.endswith("1")
            }

        plan = Schedule(steps, lr, stop_at, check_every)
        return run_steps(run, plan, modules, list(modules.named_parameters()), losses, check, dtype)
