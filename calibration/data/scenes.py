"""Records from the tabletop scene generator."""

from __future__ import annotations

import numpy as np

from ...runtime.errors import OptionError
from .. import forms
from ..workshop.scenes.grammar import DESCRIBE, caption
from ..workshop.scenes.questions import questions
from ..workshop.scenes.scene import HELDOUT, TRAIN, VALIDATION, sample_scene
from .records import ImageRef, Record

_SPLITS = {"train": TRAIN, "validation": VALIDATION, "heldout": HELDOUT}
_DEFAULT_COUNT = 4000
SEED = 0  # of the scenes that the bundled model was trained on


def load_scenes(text: str, ask: bool = False) -> list[Record]:
    """`SPLIT[:COUNT][:offset=N][:seed=N]` to records in index order.

    `offset` leaves out the first N scenes of the split; another `seed` gives other scenes at the same indices. The
    bundled model was trained on the first 64,000 of `train` with seed 0.

    Raises OptionError for an unknown split or a part that is none of these.
    """
    split, *parts = text.split(":")
    if split not in _SPLITS:
        raise OptionError(f"unknown split {split!r} of scenes; choose one of {', '.join(_SPLITS)}")
    span = _SPLITS[split]
    found = {"count": None, "offset": 0, "seed": SEED}
    for place, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals and place == 0:
            name, value = "count", part
        if not part and place == 0:  # `scenes:train:` has always meant the default
            continue
        if name not in found or not value.isdecimal() or len(value) > 9:
            raise OptionError(f"scenes:{text}: {part!r} is no part of scenes:{forms.SCENES}")
        found[name] = int(value)
    offset, seed = found["offset"] or 0, found["seed"] or 0
    count = min(_DEFAULT_COUNT, len(span) - offset) if found["count"] is None else found["count"]
    if not 0 < count <= len(span) - offset:
        raise OptionError(
            f"scenes:{text}: the count must be a number in 1..{max(0, len(span) - offset)}, the scenes after the offset"
        )
    return [(_question if ask else _caption)(seed, index) for index in span[offset : offset + count]]


def _key(seed: int, index: int) -> str:
    return f"scene-{index}" if seed == SEED else f"scene-{seed}.{index}"


def _caption(seed: int, index: int) -> Record:
    text = caption(sample_scene(seed, index))
    return Record(_key(seed, index), DESCRIBE, ImageRef(scene=(seed, index)), text)


def _question(seed: int, index: int) -> Record:
    options = questions(sample_scene(seed, index))
    asked = options[int(np.random.default_rng([seed, index, 23]).integers(len(options)))]
    return Record(
        f"{_key(seed, index)}-{asked.kind}", asked.text, ImageRef(scene=(seed, index)), asked.answer
    )
