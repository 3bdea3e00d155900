"""First stage: every row of the tower learns to say its word, through a throw-away linear head that all rows share.

A row speaks of an object that may stand anywhere in the picture. So that there is something to gather, other throw-away heads ask
every patch in the middle of the tower for the object that it shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vlmexport.calibration.data.scenes.dataset import prerender
from vlmexport.calibration.data.scenes.scene import TRAIN, VALIDATION

from ..common.labels import PATCH_CLASSES, label_table, patch_loss, patch_truth
from ..common.long_run import LongRun
from ..common.loop import Part, Schedule, run_steps
from ..precision import computing, dtype_of
from .captioner import encode, encode_all
from .model import PATCH, ROWS, SIDE, WIDTH
from .slots import BLANK, FIELDS, WORDS, said

CHUNK = 250
GRID = SIDE // PATCH
MIDDLE = 3  # layers of six
PATCHES = 0.5  # weight of the middle's loss
PROJECTOR = "projector.pt"
"""Beside the state of a finished stage: weights of the projector that fits its tower."""


def pictures_of(work: Path, seed: int, size: int, workers: int | None = None) -> np.ndarray:
    """The training's pictures, rendered once: uint8 (size, side, side, 3)."""
    return prerender(work / "data" / f"train{SIDE}-{size}.u8", seed, TRAIN[:size], SIDE, workers)


def train_vision(
    work: Path,
    model: Any,
    steps: int,
    size: int = 48_000,
    batch: int = 256,
    lr: float = 3e-3,
    seed: int = 0,
    precision: str = "auto",
    stop_at: int | None = None,
    check_every: int = 250,
    checked: int = 1000,
    device: str = "cpu",
    workers: int = 1,
) -> int:
    """Runs or continues the stage; returns the step that was reached.

    `work` receives ``data`` and ``vision`` with ``state.pt`` and ``log.jsonl``.

    Args:
        model: whose tower learns, in place; it is moved to `device`. size: training scenes; each is also used mirrored; a GPU
            holds them all. batch: pictures of a step. checked: validation scenes of a check. workers: processes that label the
            scenes. The others: see `Schedule` and `DecoderStage`.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype, data = dtype_of(precision, device), work / "data"
    settings = {"steps": steps, "pictures": size, "batch": batch, "lr": lr, "seed": seed}
    with LongRun(work / "vision", settings) as run:
        pictures = pictures_of(work, seed, size)
        labels = label_table(data / f"labels{GRID}-{size}.npz", seed, TRAIN[:size], GRID, workers)
        check_shown = prerender(data / f"val{SIDE}-{checked}.u8", seed, VALIDATION[:checked], SIDE)
        check_labels = label_table(data / f"val_labels{GRID}-{checked}.npz", seed, VALIDATION[:checked], GRID)
        # Writes would go to a copy; torch asks for memory that could be written to.
        mapped = np.memmap(pictures.filename, np.uint8, "c", shape=pictures.shape)  # pyright: ignore[reportAttributeAccessIssue]
        shown = torch.from_numpy(mapped).to(device)
        told = torch.from_numpy(said(labels, ROWS)).to(device)
        patches = torch.from_numpy(patch_truth(labels)).to(device)
        # The second half of a table is that of the mirrored pictures.
        check_truth = torch.from_numpy(said(check_labels, ROWS)[:checked])
        torch.manual_seed(seed)
        modules = nn.ModuleDict(
            {
                "tower": model.model.vision_tower,
                "heads": nn.Linear(WIDTH, len(WORDS)),
                "patch_heads": nn.Linear(WIDTH, sum(PATCH_CLASSES.values())),
            }
        )
        modules.requires_grad_().to(device)
        tower, heads, patch_heads = modules.values()

        def losses(step: int) -> Iterator[Part]:
            drawn = np.random.default_rng([seed, 7, step]).integers(0, 2 * size, batch)
            rows = torch.from_numpy(drawn).to(device, non_blocking=True)
            plain = shown[rows % size]
            seen = torch.where((rows >= size)[:, None, None, None], plain.flip(2), plain)
            with computing(dtype, device):
                last, middle = encode_all(tower, seen, [MIDDLE])
                word_logits, patch_logits = heads(last).float(), patch_heads(middle).float()
                yield {
                    "words": (1.0, F.cross_entropy(word_logits.flatten(0, 1), told[rows].flatten())),
                    "patches": (PATCHES, patch_loss(patch_logits, patches[rows])),
                }

        @torch.no_grad()
        def check() -> dict[str, Any]:
            right = []
            for at in range(0, checked, CHUNK):
                with computing(dtype, device):
                    part = torch.from_numpy(np.array(check_shown[at : at + CHUNK]))
                    best = heads(encode(tower, part)).argmax(-1).cpu()
                right.append(best == check_truth[at : at + CHUNK])
            return by_field(torch.cat(right), check_truth)

        plan = Schedule(steps, lr, stop_at, check_every)
        return run_steps(run, plan, modules, list(modules.named_parameters()), losses, check, dtype)


def by_field(right: Tensor, truth: Tensor) -> dict[str, float]:
    """Share of the rows [N, rows] that say the right word, where there is one to say."""
    right_by_field: dict[str, list[Tensor]] = {}
    for place, field in enumerate(FIELDS):
        right_by_field.setdefault(field, []).append(right[:, place][truth[:, place] != WORDS.index(BLANK)])
    return {
        name: round(torch.cat(values).float().mean().item(), 4) for name, values in right_by_field.items()
    }


def take_vision(model: Any, folder: Path) -> None:
    """Copies the tower and the projector that a stage's folder holds into a model."""
    stored = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")["model"]
    tower = {n.removeprefix("tower."): p for n, p in stored.items() if n.startswith("tower.")}
    model.model.vision_tower.load_state_dict(tower)
    model.model.multi_modal_projector.load_state_dict(
        torch.load(folder / PROJECTOR, weights_only=True, map_location="cpu")
    )
