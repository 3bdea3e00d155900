"""Records from the tabletop scene generator."""

from __future__ import annotations

import numpy as np

from ...runtime.errors import OptionError
from ..workshop.scenes.grammar import DESCRIBE, caption
from ..workshop.scenes.questions import questions
from ..workshop.scenes.scene import HELDOUT, TRAIN, VALIDATION, sample_scene
from .records import ImageRef, Record

_SPLITS = {"train": TRAIN, "validation": VALIDATION, "heldout": HELDOUT}
_DEFAULT_COUNT = 4000
SEED = 0


def load_scenes(text: str, ask: bool = False) -> list[Record]:
    """`SPLIT[:COUNT]` to records in index order; OptionError for an unknown split or a count that is none."""
    split, _, count = text.partition(":")
    if split not in _SPLITS:
        raise OptionError(f"unknown split {split!r} of scenes; choose one of {', '.join(_SPLITS)}")
    span = _SPLITS[split]
    if count and not (count.isdigit() and 0 < int(count) <= len(span)):
        raise OptionError(f"scenes:{split}:{count}: the count must be a number in 1..{len(span)}")
    indices = span[: int(count) if count else _DEFAULT_COUNT]
    return [(_question if ask else _caption)(index) for index in indices]


def _caption(index: int) -> Record:
    text = caption(sample_scene(SEED, index))
    return Record(f"scene-{index}", DESCRIBE, ImageRef(scene=(SEED, index)), text)


def _question(index: int) -> Record:
    options = questions(sample_scene(SEED, index))
    asked = options[int(np.random.default_rng([SEED, index, 23]).integers(len(options)))]
    return Record(f"scene-{index}-{asked.kind}", asked.text, ImageRef(scene=(SEED, index)), asked.answer)
