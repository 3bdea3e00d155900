"""What the vision stage is asked: the scene's facts as integer arrays, also for mirrored pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vlmexport.calibration.data.scenes.render import box_of, drawing_order
from vlmexport.calibration.data.scenes.scene import LANE_COUNT, MOST_OBJECTS, Scene, sample_scene
from vlmexport.calibration.data.scenes.vocabulary import (
    COLOURS,
    GAPS,
    KINDS,
    LIGHTS,
    PATTERNS,
    SIZES,
    TABLES,
    WALLS,
)

NONE = -100  # the index that cross entropy ignores
GRID = 8
SLOT_CLASSES = {
    "kind": len(KINDS) + 1,  # the last class is "no object"
    "colour": len(COLOURS),
    "size": len(SIZES),
    "pattern": len(PATTERNS),
    "lane": LANE_COUNT,
    "gap": len(GAPS),
    "depth": 3,
}
GLOBAL_CLASSES = {"table": len(TABLES), "wall": len(WALLS), "light": len(LIGHTS), "count": MOST_OBJECTS + 1}
PATCH_FIELDS = ("kind", "colour", "size", "pattern", "lane")
PATCH_CLASSES = {name: SLOT_CLASSES[name] for name in PATCH_FIELDS} | {"ordinal": MOST_OBJECTS + 1}


def scene_labels(scene: Scene, grid: int = GRID) -> dict[str, np.ndarray]:
    """Integer labels of one scene, whose picture has `grid` times `grid` patches.

    Returns:
        one int64 array (5,) per name of `SLOT_CLASSES` (objects from left to right), one scalar
        per name of `GLOBAL_CLASSES`, and ``owner`` (grid, grid): the object at each patch, -1 for none.
    """
    colours, walls = tuple(COLOURS), tuple(WALLS)
    labels = {name: np.full(MOST_OBJECTS, NONE, np.int64) for name in SLOT_CLASSES}
    labels["kind"][:] = len(KINDS)
    for i, item in enumerate(scene.objects):
        labels["kind"][i] = KINDS.index(item.kind)
        labels["colour"][i] = colours.index(item.colour)
        labels["size"][i] = SIZES.index(item.size)
        labels["pattern"][i] = PATTERNS.index(item.pattern)
        labels["lane"][i] = item.lane
    for i, relation in enumerate(scene.relations):
        labels["gap"][i + 1] = GAPS.index(relation.gap)
        labels["depth"][i + 1] = np.sign(scene.objects[i + 1].lane - scene.objects[i].lane) + 1
    values = (
        TABLES.index(scene.table),
        walls.index(scene.wall),
        LIGHTS.index(scene.light),
        len(scene.objects),
    )
    labels.update({name: np.asarray(v, np.int64) for name, v in zip(GLOBAL_CLASSES, values, strict=True)})
    labels["owner"] = _owner(scene, grid)
    return labels


def _owner(scene: Scene, grid: int) -> np.ndarray:
    owner = np.full((grid, grid), -1, np.int64)
    centres = (np.arange(grid) + 0.5) / grid
    for i in drawing_order(scene):
        left, top, right, bottom = box_of(scene, scene.objects[i])
        inside = ((centres >= top) & (centres <= bottom))[:, None] & ((centres >= left) & (centres <= right))[
            None
        ]
        owner[inside] = i
        row, column = int((top + bottom) / 2 * grid), int((left + right) / 2 * grid)
        owner[min(max(row, 0), grid - 1), min(max(column, 0), grid - 1)] = i
    return owner


def mirrored(labels: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Labels of the same picture flipped left to right."""
    n = int(labels["count"])
    result = {name: value.copy() for name, value in labels.items()}
    for name in ("kind", "colour", "size", "pattern", "lane"):
        result[name][:n] = labels[name][:n][::-1]
    result["gap"][1:n] = labels["gap"][1:n][::-1]
    result["depth"][1:n] = 2 - labels["depth"][1:n][::-1]
    result["light"] = 1 - labels["light"]
    owner = labels["owner"][:, ::-1]
    result["owner"] = np.where(owner >= 0, n - 1 - owner, -1)
    return result


def label_table(
    path: Path, seed: int, indices: range, grid: int = GRID, workers: int = 1
) -> dict[str, np.ndarray]:
    """Labels of many scenes, cached in ``path`` and made by so many processes; row ``len(indices) + r`` is row ``r`` mirrored."""
    if not path.exists():
        several = [seed] * len(indices), [grid] * len(indices), indices
        if workers > 1:
            with ProcessPoolExecutor(workers) as pool:
                plain = list(pool.map(_labels, *several, chunksize=500))
        else:
            plain = list(map(_labels, *several))
        rows = plain + [mirrored(r) for r in plain]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **{name: np.stack([r[name] for r in rows]).astype(np.int16) for name in rows[0]})  # type: ignore[arg-type]
        partial.replace(path)
    with np.load(path) as stored:
        return {name: stored[name].astype(np.int64) for name in stored.files}


def _labels(seed: int, grid: int, index: int) -> dict[str, np.ndarray]:
    return scene_labels(sample_scene(seed, index), grid)


def patch_truth(labels: dict[str, np.ndarray]) -> np.ndarray:
    """What every patch is asked about the object that it shows: int64 (N, rows, questions), `NONE` where there is none."""
    owner = labels["owner"].reshape(len(labels["owner"]), -1)
    answers = [
        np.where(owner < 0, NONE, np.take_along_axis(labels[name], owner.clip(0), 1)) for name in PATCH_FIELDS
    ]
    return np.stack([*answers, np.where(owner < 0, MOST_OBJECTS, owner)], -1)


def patch_loss(asked: Tensor, truth: Tensor) -> Tensor:
    """As `asked_loss`, of patches [B, rows, classes] that are asked for `PATCH_CLASSES`."""
    return asked_loss(asked, truth, PATCH_CLASSES)


def asked_loss(asked: Tensor, truth: Tensor, classes: Mapping[str, int]) -> Tensor:
    """Mean over the questions of the cross entropies.

    Args:
        asked: logits [..., classes of all questions], side by side. truth: [..., questions], `NONE` where there is none.
        classes: of each question, by its name.
    """
    parts = asked.split([*classes.values()], -1)
    each = [
        F.cross_entropy(part.flatten(0, -2), truth[..., place].flatten(), ignore_index=NONE)
        for place, part in enumerate(parts)
    ]
    return torch.stack(each).mean()


def asked_right(asked: Tensor, truth: Tensor, classes: Mapping[str, int]) -> dict[str, Tensor]:
    """By question, which answers are right, as `accuracies` takes them; arguments as of `asked_loss`."""
    parts = zip(classes, asked.split([*classes.values()], -1), truth.unbind(-1), strict=True)
    return {
        name: torch.where(known == NONE, -1, (part.argmax(-1) == known).long()) for name, part, known in parts
    }


def accuracies(batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """Share of right answers by question, rounded; an answer is right (1), wrong (0) or not asked for (-1)."""
    by_question: dict[str, list[Tensor]] = {}
    for correct in batches:
        for name, value in correct.items():
            by_question.setdefault(name, []).append(value.flatten())
    joined = {name: torch.cat(values) for name, values in by_question.items()}
    return {name: round(v[v >= 0].float().mean().item(), 4) for name, v in joined.items()}
