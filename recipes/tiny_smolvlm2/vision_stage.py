"""First stage: the tower and the connector learn what lies where, through throw-away linear heads.

A row of a tile is asked for the object at each of its four patches: what a tile shows well, and all that it can know, for it
sees no other tile. The four rows of the whole picture are asked together for the objects from left to right, with their lanes and
distances. The setting is asked of the tiles' rows in the mean and of the whole's: either must do alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vlmexport.calibration.data.scenes.dataset import prerender
from vlmexport.calibration.data.scenes.scene import MOST_OBJECTS, TRAIN, VALIDATION

from ..common.labels import (
    GLOBAL_CLASSES,
    PATCH_CLASSES,
    SLOT_CLASSES,
    accuracies,
    asked_loss,
    asked_right,
    label_table,
    patch_truth,
)
from ..common.long_run import LongRun
from ..common.loop import Part, Schedule, run_steps
from ..precision import computing, dtype_of
from .model import WIDTH, build_model
from .tiles import GRID, SCALE, SIDE, TILE_ROWS, by_row, encode, pixels_of
from .tokenizer import build_tokenizer

CHUNK = 100  # pictures that are checked together
ASKED = {"tile": PATCH_CLASSES, "whole": SLOT_CLASSES, "setting": GLOBAL_CLASSES}
"""Questions to the rows of tiles, to those of the whole picture and to either, by group."""


class TileHeads(nn.Module):
    """Linear readers of rows; used in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.tile_heads = nn.Linear(WIDTH, SCALE**2 * sum(PATCH_CLASSES.values()))
        self.whole_heads = nn.Linear(TILE_ROWS * WIDTH, MOST_OBJECTS * sum(SLOT_CLASSES.values()))
        self.setting_heads = nn.Linear(WIDTH, sum(GLOBAL_CLASSES.values()))

    def forward(self, rows: Tensor) -> dict[str, Tensor]:
        """Logits by group of `ASKED`, of rows [B, 40, width]: of tiles [B, 36, 4, classes], of the whole [B, 5, classes], of the
        setting [B, 2, classes], by the tiles and by the whole."""
        tiles, whole = rows[:, :-TILE_ROWS], rows[:, -TILE_ROWS:]
        return {
            "tile": self.tile_heads(tiles).unflatten(-1, (SCALE**2, -1)).float(),
            "whole": self.whole_heads(whole.flatten(1)).unflatten(-1, (MOST_OBJECTS, -1)).float(),
            "setting": self.setting_heads(torch.stack([tiles.mean(1), whole.mean(1)], 1)).float(),
        }


def truths_of(labels: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """What every head should say, by group, of N scenes as `label_table` has them: shapes as of `TileHeads` with questions in the
    place of classes."""
    slots = [torch.from_numpy(labels[name]) for name in SLOT_CLASSES]
    setting = [torch.from_numpy(labels[name]) for name in GLOBAL_CLASSES]
    return {
        "tile": by_row(torch.from_numpy(patch_truth(dict(labels)))),
        "whole": torch.stack(slots, -1),
        "setting": torch.stack(setting, -1)[:, None].expand(-1, 2, -1),
    }


def train_vision(
    work: Path,
    steps: int,
    size: int = 64_000,
    batch: int = 128,
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
        size: training scenes; each is also used mirrored. batch: pictures of a step. checked: validation scenes of a check.
        workers: processes that draw and label the scenes. The others: see `Schedule` and `DecoderStage`.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype, data = dtype_of(precision, device), work / "data"
    settings = {"steps": steps, "pictures": size, "batch": batch, "lr": lr, "seed": seed}
    with LongRun(work / "vision", settings) as run:
        pictures = pictures_of(work, seed, size, workers)
        truths = truths_of(label_table(data / f"labels{GRID}-{size}.npz", seed, TRAIN[:size], GRID, workers))
        span = VALIDATION[:checked]
        check_shown = prerender(data / f"val{SIDE}-{checked}.u8", seed, span, SIDE, workers)
        check_truths = truths_of(
            label_table(data / f"val_labels{GRID}-{checked}.npz", seed, span, GRID, workers)
        )
        model, heads = build_model(build_tokenizer(), seed).model, TileHeads()
        # Of 16 patches, PyTorch's fused kernel for the CPU takes 2.8 times as long for a step in bfloat16.
        model.vision_model.config._attn_implementation = "eager"
        modules = nn.ModuleDict(
            {"vision_model": model.vision_model, "connector": model.connector, "heads": heads}
        ).to(device)

        def losses(step: int) -> Iterator[Part]:
            drawn = np.random.default_rng([seed, 7, step]).integers(0, 2 * size, batch)
            shown = np.array(pictures[drawn % size])
            shown[drawn >= size] = shown[drawn >= size][:, :, ::-1]
            with computing(dtype, device):
                logits = heads(encode(model, pixels_of(shown).to(device)))
                yield {
                    name: (1.0, asked_loss(logits[name], truths[name][drawn].to(device), classes))
                    for name, classes in ASKED.items()
                }

        @torch.no_grad()
        def answers(start: int) -> dict[str, Tensor]:
            part = slice(start, min(start + CHUNK, checked))
            with computing(dtype, device):
                logits = heads(encode(model, pixels_of(np.array(check_shown[part])).to(device)))
            return {
                f"{group}_{name}": right
                for group, classes in ASKED.items()
                for name, right in asked_right(
                    logits[group].cpu(), check_truths[group][part], classes
                ).items()
            }

        def check() -> dict[str, Any]:
            return accuracies(map(answers, range(0, checked, CHUNK)))

        plan = Schedule(steps, lr, stop_at, check_every)
        return run_steps(run, plan, modules, list(modules.named_parameters()), losses, check, dtype)


def pictures_of(work: Path, seed: int, size: int, workers: int | None = None) -> np.ndarray:
    """The training's pictures, rendered once: uint8 (size, side, side, 3)."""
    return prerender(work / "data" / f"train{SIDE}-{size}.u8", seed, TRAIN[:size], SIDE, workers)


def take_vision(model: Any, state: Path) -> None:
    """Copies the tower and the connector of a stage's state into a model."""
    stored = torch.load(state, weights_only=True, map_location="cpu")["model"]
    for name in ("vision_model", "connector"):
        part = {n.removeprefix(f"{name}."): p for n, p in stored.items() if n.startswith(f"{name}.")}
        getattr(model.model, name).load_state_dict(part)
