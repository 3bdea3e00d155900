"""First stage: the tower learns the rows of `teacher`, and what lies where in both frames of a patch.

The rows of a picture are the teacher's. Those of a film's pair of frames, between which something may have happened, let
throw-away heads read off the teacher's rows of either frame, the object at their place in either and, in the mean over all
rows, the setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vlmexport.calibration.data.scenes.dataset import resized_to
from vlmexport.calibration.data.scenes.film import sample_film
from vlmexport.calibration.data.scenes.scene import MOST_OBJECTS, TRAIN, VALIDATION, Scene, sample_scene

from ..common.labels import GLOBAL_CLASSES, NONE, SLOT_CLASSES, accuracies, mirrored, scene_labels
from ..common.long_run import LongRun
from ..common.loop import Part, Schedule, run_steps
from ..precision import computing, dtype_of
from .teacher import Teacher
from .tower import FRAMES, SIDE, WIDTH, build_tower, encode, patches

CHECKED = 400  # validation pictures, and as many pairs of frames
CHUNK = 100  # views that are checked together
ROW_CLASSES = SLOT_CLASSES | {"ordinal": MOST_OBJECTS + 1}
ONCE = ("table", "wall", "light")  # of both frames
LIKENESS = 10.0  # weight of the squared error, about 1 at first, beside twenty-odd cross entropies


@dataclass(frozen=True)
class View:
    """Two frames of a patch.

    frames: uint8 (2, side, side, 3). small: as the teacher takes them, uint8 (2, its side, its side, 3). labels: of each.
    """

    frames: np.ndarray
    small: np.ndarray
    labels: list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Views:
    """A batch of views: patches float [B, 256, 1176], the teacher's rows of either frame [2, B, 64, width], labels
    [B, ...] by name for either frame, and which are pictures: bool [B]."""

    pixels: Tensor
    taught: Tensor
    labels: list[dict[str, Tensor]]
    still: Tensor


class RowHeads(nn.Module):
    """Linear readers of rows; used in training only. Those of the teacher's rows begin as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.taught_heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(FRAMES))
        for reader in self.taught_heads:
            nn.init.eye_(reader.weight)  # pyright: ignore[reportArgumentType]
        row_heads = {f"{n}{f}": nn.Linear(WIDTH, c) for n, c in ROW_CLASSES.items() for f in range(FRAMES)}
        setting = {n: nn.Linear(WIDTH, GLOBAL_CLASSES[n]) for n in ONCE}
        setting |= {f"count{f}": nn.Linear(WIDTH, GLOBAL_CLASSES["count"]) for f in range(FRAMES)}
        self.row_heads, self.setting_heads = nn.ModuleDict(row_heads), nn.ModuleDict(setting)


def picture_view(seed: int, index: int, flip: bool, side: int) -> View:
    """A picture as both frames, perhaps mirrored; `side` of the teacher's."""
    scene = sample_scene(seed, index)
    frames, labels = resized_to(scene, SIDE, side), scene_labels(scene)
    if flip:
        frames, labels = [frame[:, ::-1] for frame in frames], mirrored(labels)
    large, small = (np.stack([frame] * FRAMES) for frame in frames)
    return View(large, small, [labels] * FRAMES)


def film_view(seed: int, index: int, draw: int, side: int) -> View:
    """Two frames of a film that one patch shows; `draw` says which two."""
    frames = sample_film(seed, index).frames
    at = draw % (len(frames) // FRAMES) * FRAMES
    pair: Sequence[Scene] = frames[at : at + FRAMES]
    large, small = (
        np.stack(kind) for kind in zip(*(resized_to(scene, SIDE, side) for scene in pair), strict=True)
    )
    return View(large, small, [scene_labels(scene) for scene in pair])


def batch_of(views: Sequence[View], teacher: Teacher) -> Views:
    """Patches, what they are to say, and labels of views."""
    labels = [
        {name: torch.from_numpy(np.stack([v.labels[f][name] for v in views])) for name in views[0].labels[f]}
        for f in range(FRAMES)
    ]
    # A picture is the same in both frames: the teacher looks once.
    still = np.array([np.array_equal(*v.small) for v in views])
    first = teacher.rows(np.stack([v.small[0] for v in views]))
    second = first.clone()
    if not still.all():
        second[~still] = teacher.rows(np.stack([v.small[1] for v in views])[~still])
    pixels = patches(np.stack([v.frames for v in views]))
    return Views(pixels, torch.stack([first, second]), labels, torch.from_numpy(still))


def likeness(heads: RowHeads, image_embeds: Tensor, views: Views) -> Tensor:
    """Mean squared error [B] of the teacher's rows: of those of pictures as they are, of those of pairs as they are read."""
    predictions = [
        torch.where(views.still[:, None, None], image_embeds, reader(image_embeds)).float()
        for reader in heads.taught_heads
    ]
    return torch.stack(
        [(f - t).square().mean((1, 2)) for f, t in zip(predictions, views.taught, strict=True)]
    ).mean(0)


def row_loss(
    heads: RowHeads, image_embeds: Tensor, labels: list[dict[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed cross entropies over both frames, and per question the answers' correctness (1, 0) or -1 for none."""
    loss, correct = image_embeds.new_zeros((), dtype=torch.float32), {}
    mean = image_embeds.mean(1)
    for frame, truths in enumerate(labels):
        owner = truths["owner"].flatten(1)
        for name in ROW_CLASSES:
            if name == "ordinal":
                truth = torch.where(owner >= 0, owner, MOST_OBJECTS)
            else:
                truth = truths[name].gather(1, owner.clamp_min(0)).masked_fill(owner < 0, NONE)
            logits = heads.row_heads[f"{name}{frame}"](image_embeds).float()
            loss = loss + F.cross_entropy(logits.flatten(0, 1), truth.flatten(), ignore_index=NONE)
            correct[f"{name}{frame}"] = torch.where(truth == NONE, -1, (logits.argmax(-1) == truth).long())
        for name in (*(ONCE if frame == 0 else ()), "count"):
            known = name if name in ONCE else f"{name}{frame}"
            logits = heads.setting_heads[known](mean).float()
            loss = loss + F.cross_entropy(logits, truths[name])
            correct[known] = (logits.argmax(-1) == truths[name]).long()
    return loss, correct


@torch.no_grad()
def evaluate(
    tower: Any, heads: RowHeads, views: Sequence[View], teacher: Teacher, dtype: torch.dtype
) -> dict[str, float]:
    """Accuracy per question over all rows, and under ``taught`` the share of the variance of the teacher's rows."""
    missed: list[Tensor] = []
    told: list[Tensor] = []

    def answers(at: int) -> dict[str, Tensor]:
        part = batch_of(views[at : at + CHUNK], teacher)
        with computing(dtype):
            image_embeds = encode(tower, part.pixels)
            missed.append(likeness(heads, image_embeds, part))
            told.append(part.taught.flatten(0, 2))
            return row_loss(heads, image_embeds, part.labels)[1]

    accuracy = accuracies(map(answers, range(0, len(views), CHUNK)))
    return accuracy | {
        "taught": round(1 - (torch.cat(missed).mean() / torch.cat(told).var(0).mean()).item(), 4)
    }


def train_vision(
    work: Path,
    steps: int,
    scenes: int,
    teacher: Teacher,
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
        scenes: the first so many of `train` are drawn. teacher: whose rows are learned. pictures, films: views of
            a step.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype = dtype_of(precision)
    settings = {
        "steps": steps,
        "teacher": teacher.digest,
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
            "picture": [picture_view(seed, i, False, teacher.side) for i in VALIDATION[:CHECKED]],
            "film": [film_view(seed, i, i, teacher.side) for i in VALIDATION[:CHECKED]],
        }

        def losses(step: int) -> Iterator[Part]:
            rng = np.random.default_rng([seed, 7, step])
            chosen = [TRAIN[i] for i in rng.integers(0, scenes, pictures + films)]
            flips, draws = rng.random(pictures) < 0.5, rng.integers(0, 1 << 16, films)
            side = teacher.side
            views = [
                picture_view(seed, i, bool(f), side) for i, f in zip(chosen[:pictures], flips, strict=True)
            ]
            views += [film_view(seed, i, int(d), side) for i, d in zip(chosen[pictures:], draws, strict=True)]
            batch = batch_of(views, teacher)
            with computing(dtype):
                image_embeds = encode(tower, batch.pixels)
                yield {
                    "rows": (1.0, row_loss(heads, image_embeds, batch.labels)[0]),
                    "taught": (LIKENESS, likeness(heads, image_embeds, batch).mean()),
                }

        def check() -> dict[str, Any]:
            return {
                f"{kind}_{name}": value
                for kind, views in checks.items()
                for name, value in evaluate(tower, heads, views, teacher, dtype).items()
                if kind == "film" or not name.endswith("1")
            }

        plan = Schedule(steps, lr, stop_at, check_every)
        return run_steps(run, plan, modules, list(modules.named_parameters()), losses, check, dtype)
