"""Records from the tabletop scene generator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...runtime.errors import OptionError
from .. import forms
from ..workshop.scenes import authored
from ..workshop.scenes.grammar import DESCRIBE, caption
from ..workshop.scenes.questions import questions
from ..workshop.scenes.scene import HELDOUT, TRAIN, VALIDATION, sample_scene
from .records import ImageRef, Record

_SPLITS = {"train": TRAIN, "validation": VALIDATION, "heldout": HELDOUT}
_DEFAULT_COUNT = 4000
SEED = 0  # of the scenes that the bundled model was trained on


@dataclass(frozen=True)
class _Wording:
    """Form 1: every word decided by the scene, as the shipped model learned it. Form 2: words that hidden authors draw,
    differently for every `variant`."""

    form: int
    variant: int


def load_scenes(text: str, ask: bool = False) -> list[Record]:
    """`SPLIT[:COUNT][:offset=N][:seed=N][:form=N][:variant=N]` to records in index order.

    `offset` leaves out the first N scenes of the split; another `seed` gives other scenes at the same indices. The
    bundled model was trained on the first 64,000 of `train` with seed 0. `form=2` tells the same scenes in sampled
    words; each `variant` of it (default 0) is another sample.

    Raises OptionError for an unknown split or a part that is none of these.
    """
    split, *parts = text.split(":")
    if split not in _SPLITS:
        raise OptionError(f"unknown split {split!r} of scenes; choose one of {', '.join(_SPLITS)}")
    span = _SPLITS[split]
    found: dict[str, int | None] = dict.fromkeys(("count", "offset", "seed", "form", "variant"))
    for place, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals and place == 0:
            name, value = "count", part
        if not part and place == 0:  # `scenes:train:` has always meant the default
            continue
        if name not in found or not value.isdecimal() or len(value) > 9:
            raise OptionError(f"scenes:{text}: {part!r} is no part of scenes:{forms.SCENES}")
        if found[name] is not None:
            raise OptionError(f"scenes:{text}: {name} is given twice")
        found[name] = int(value)
    offset, seed, form = (
        found["offset"] or 0,
        found["seed"] or 0,
        1 if found["form"] is None else found["form"],
    )
    count = min(_DEFAULT_COUNT, len(span) - offset) if found["count"] is None else found["count"]
    if not 0 < count <= len(span) - offset:
        raise OptionError(
            f"scenes:{text}: the count must be a number in 1..{max(0, len(span) - offset)}, the scenes after the offset"
        )
    if form not in (1, 2):
        raise OptionError(f"scenes:{text}: there is no form {form} of the texts; choose 1 or 2")
    if form == 1 and found["variant"] is not None:
        raise OptionError(f"scenes:{text}: form 1 has one wording a scene; add form=2 for variants")
    wording = _Wording(form, found["variant"] or 0)
    make = _question if ask else _caption
    return [make(seed, index, wording) for index in span[offset : offset + count]]


def _key(seed: int, index: int, wording: _Wording) -> str:
    key = f"scene-{index}" if seed == SEED else f"scene-{seed}.{index}"
    return key if wording.form == 1 else f"{key}-variant-{wording.variant}"


def _caption(seed: int, index: int, wording: _Wording) -> Record:
    scene = sample_scene(seed, index)
    text = caption(scene) if wording.form == 1 else authored.tell(scene, wording.variant).text
    return Record(_key(seed, index, wording), DESCRIBE, ImageRef(scene=(seed, index)), text)


def _question(seed: int, index: int, wording: _Wording) -> Record:
    scene = sample_scene(seed, index)
    if wording.form == 1:
        options = questions(scene)
        asked = options[int(np.random.default_rng([seed, index, 23]).integers(len(options)))]
    else:
        asked = authored.ask(scene, wording.variant)
    key = f"{_key(seed, index, wording)}-{asked.kind}"
    return Record(key, asked.text, ImageRef(scene=(seed, index)), asked.answer)
