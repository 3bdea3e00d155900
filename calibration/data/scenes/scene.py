"""Scenes as data: sampling one from (seed, index), and the three splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .vocabulary import COLOURS, KINDS, LANES, LIGHTS, PATTERNS, SIZES, TABLES, UNSEEN, WALLS

TRAIN = range(0, 1_000_000)
VALIDATION = range(1_000_000, 2_000_000)
HELDOUT = range(2_000_000, 3_000_000)

MOST_OBJECTS = 5
LANE_COUNT = len(LANES)

_COLOUR_NAMES = tuple(COLOURS)
_WALL_NAMES = tuple(WALLS)
_LANE_Y = (0.50, 0.69, 0.88)  # where an object of a lane touches the table
_LANE_SCALE = (0.94, 1.0, 1.06)
_WIDTH = (0.155, 0.22)  # of the picture, by size
_SPAN = (0.11, 0.89)  # where centres of objects lie
_CLOSEST = 0.148  # distance of neighbours
_NEAR = 0.2  # between the distances of neighbours that are near (at most 0.165) and far (at least 0.23)


@dataclass(frozen=True)
class SceneObject:
    """One object; positions and lengths are fractions of the picture's side."""

    kind: str
    colour: str
    size: str
    pattern: str
    lane: int  # 0 back, 1 middle, 2 front
    x: float  # centre
    y: float  # where it touches the table
    width: float
    handle: int  # side of a mug's handle, -1 or 1
    shade: float  # brightness factor of the paint


@dataclass(frozen=True)
class Relation:
    """How an object lies to its left neighbour: always right of it, and ..."""

    gap: str  # "near" or "far"
    depth: str  # "behind", "level" or "front"


@dataclass(frozen=True)
class Scene:
    """A tabletop scene; ``objects`` and ``relations`` run from left to right."""

    seed: int
    index: int
    objects: tuple[SceneObject, ...]
    relations: tuple[Relation, ...]  # one per neighbouring pair
    table: str
    wall: str
    light: str
    horizon: float
    texture: tuple[float, float, float, float]  # phase and tint jitter of table and wall
    zoom: float
    shift: tuple[float, float]

    @property
    def unseen(self) -> tuple[int, ...]:
        """Positions of the objects whose (colour, kind) never occurs in training."""
        return tuple(i for i, o in enumerate(self.objects) if (o.colour, o.kind) in UNSEEN)


def split_of(index: int) -> str:
    """Name of the split that owns ``index``.

    Raises:
        ValueError: the index belongs to no split.
    """
    for name, span in (("train", TRAIN), ("validation", VALIDATION), ("heldout", HELDOUT)):
        if index in span:
            return name
    raise ValueError(f"scene index {index} is outside every split (0 to {HELDOUT.stop - 1})")


def sample_scene(seed: int, index: int) -> Scene:
    """The scene number ``index`` of world ``seed``; the same arguments give the same scene.

    Train and validation never contain a pair of `vocabulary.UNSEEN`.

    Raises:
        ValueError: ``index`` belongs to no split.
    """
    with_unseen = split_of(index) == "heldout"
    rng = np.random.default_rng([seed, index])
    count = int(rng.choice([2, 3, 4, 5], p=[0.2, 0.3, 0.3, 0.2]))
    relation_gaps = _gaps(rng, count)
    lanes = rng.integers(0, 3, size=count)
    distances = [rng.uniform(0.23, 0.27) if far else rng.uniform(_CLOSEST, 0.165) for far in relation_gaps]
    span = float(sum(distances))
    left = float(rng.uniform(_SPAN[0], _SPAN[1] - span))
    centres = np.concatenate([[left], left + np.cumsum(distances)])

    objects: list[SceneObject] = []
    used: set[tuple[str, str]] = set() if with_unseen else set(UNSEEN)
    for position in range(count):
        while True:
            colour = str(rng.choice(_COLOUR_NAMES))
            kind = str(rng.choice(KINDS))
            if (colour, kind) not in used:
                break
        used.add((colour, kind))
        size, lane = int(rng.integers(2)), int(lanes[position])
        objects.append(
            SceneObject(
                kind=kind,
                colour=colour,
                size=SIZES[size],
                pattern=PATTERNS[int(rng.integers(2))],
                lane=lane,
                x=float(centres[position]),
                y=_LANE_Y[lane] + float(rng.uniform(-0.02, 0.02)),
                width=_WIDTH[size] * _LANE_SCALE[lane] * float(rng.uniform(0.96, 1.04)),
                handle=int(rng.integers(2)) * 2 - 1,
                shade=float(rng.uniform(0.94, 1.0)),
            )
        )
    relations = tuple(
        Relation(
            gap="far" if relation_gaps[i] else "near",
            depth=("behind", "level", "front")[int(np.sign(lanes[i + 1] - lanes[i])) + 1],
        )
        for i in range(count - 1)
    )
    texture = rng.uniform(0.0, 1.0, size=4)
    return Scene(
        seed=seed,
        index=index,
        objects=tuple(objects),
        relations=relations,
        table=str(rng.choice(TABLES)),
        wall=str(rng.choice(_WALL_NAMES)),
        light=str(rng.choice(LIGHTS)),
        horizon=float(rng.uniform(0.27, 0.32)),
        texture=(float(texture[0]), float(texture[1]), float(texture[2]), float(texture[3])),
        zoom=float(rng.uniform(0.97, 1.03)),
        shift=(float(rng.uniform(-0.02, 0.02)), float(rng.uniform(-0.02, 0.02))),
    )


def _gaps(rng: np.random.Generator, count: int) -> list[bool]:
    """Which neighbours lie far apart; as many as fit into the picture."""
    far = [bool(v) for v in rng.integers(0, 2, size=count - 1)]
    most = {2: 1, 3: 2, 4: 2, 5: 1}[count]
    while sum(far) > most:
        far[int(rng.choice(np.flatnonzero(far)))] = False
    return far


def in_lane(item: SceneObject, lane: int) -> SceneObject:
    """The object moved to another lane: straight towards the viewer or away, larger the nearer it is."""
    scale = _LANE_SCALE[lane] / _LANE_SCALE[item.lane]
    return replace(item, lane=lane, y=item.y + _LANE_Y[lane] - _LANE_Y[item.lane], width=item.width * scale)


def with_objects(scene: Scene, objects: Sequence[SceneObject]) -> Scene:
    """The scene with other objects, from left to right; how each lies to its left neighbour follows from where they are."""
    relations = tuple(
        Relation(
            gap="far" if right.x - left.x > _NEAR else "near",
            depth=("behind", "level", "front")[int(np.sign(right.lane - left.lane)) + 1],
        )
        for left, right in pairwise(objects)
    )
    return replace(scene, objects=tuple(objects), relations=relations)


def free_place(scene: Scene) -> float | None:
    """Where one object more would stand beside or between the others, as the centre of the widest gap; None on a full
    table."""
    if len(scene.objects) >= MOST_OBJECTS:
        return None
    edges = [_SPAN[0] - _CLOSEST, *(o.x for o in scene.objects), _SPAN[1] + _CLOSEST]
    left, right = max(pairwise(edges), key=lambda gap: gap[1] - gap[0])
    return (left + right) / 2 if right - left >= 2 * _CLOSEST else None


def mirror(scene: Scene) -> Scene:
    """The scene whose picture is the left-right flipped picture, up to the table's texture."""
    flipped = tuple(replace(o, x=1.0 - o.x, handle=-o.handle) for o in reversed(scene.objects))
    turned = {"behind": "front", "front": "behind", "level": "level"}
    relations = tuple(Relation(r.gap, turned[r.depth]) for r in reversed(scene.relations))
    light = LIGHTS[1 - LIGHTS.index(scene.light)]
    return replace(
        scene, objects=flipped, relations=relations, light=light, shift=(-scene.shift[0], scene.shift[1])
    )
