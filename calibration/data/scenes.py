"""Records from the tabletop scene generator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...runtime.errors import OptionError
from .. import forms
from ..workshop.scenes.asking import DESCRIBE, ask
from ..workshop.scenes.caption import tell
from ..workshop.scenes.scene import HELDOUT, TRAIN, VALIDATION, sample_scene
from .records import ImageRef, Record

_SPLITS = {"train": TRAIN, "validation": VALIDATION, "heldout": HELDOUT}
_DEFAULT_COUNT = 4000
SEED = 0  # of the scenes that the bundled models were trained on


def load_scenes(text: str, form: str = "scenes") -> list[Record]:
    """`SPLIT[:COUNT][:offset=N][:seed=N][:variant=N]` to records in index order; `form` is one of `FORMS`.

    `offset` leaves out the first N scenes of the split; another `seed` gives other scenes at the same indices. The
    bundled models were trained on the first 64,000 of `train` with seed 0. Each `variant` (default 0) tells the same scenes
    in other words.

    Raises OptionError for an unknown split or a part that is none of these.
    """
    split, *parts = text.split(":")
    if split not in _SPLITS:
        raise OptionError(f"unknown split {split!r} of scenes; choose one of {', '.join(_SPLITS)}")
    span = _SPLITS[split]
    found: dict[str, int | None] = dict.fromkeys(("count", "offset", "seed", "variant"))
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
    offset, seed, variant = (found[name] or 0 for name in ("offset", "seed", "variant"))
    count = min(_DEFAULT_COUNT, len(span) - offset) if found["count"] is None else found["count"]
    if not 0 < count <= len(span) - offset:
        raise OptionError(
            f"scenes:{text}: the count must be a number in 1..{max(0, len(span) - offset)}, the scenes after the offset"
        )
    make = FORMS[form]
    return [make(seed, index, variant) for index in span[offset : offset + count]]


def _key(seed: int, index: int, variant: int) -> str:
    key = f"scene-{index}" if seed == SEED else f"scene-{seed}.{index}"
    return f"{key}-variant-{variant}" if variant else key


def _caption(seed: int, index: int, variant: int) -> Record:
    text = tell(sample_scene(seed, index), variant).text
    return Record(
        _key(seed, index, variant), DESCRIBE, ImageRef(scene=(seed, index)), text, references=(text,)
    )


def _bare_caption(seed: int, index: int, variant: int) -> Record:
    return replace(_caption(seed, index, variant), prompt="")


def _question(seed: int, index: int, variant: int) -> Record:
    asked = ask(sample_scene(seed, index), variant)
    key = f"{_key(seed, index, variant)}-{asked.kind}"
    return Record(key, asked.text, ImageRef(scene=(seed, index)), asked.answer, references=(asked.answer,))


FORMS: dict[str, Callable[[int, int, int], Record]] = {
    "scenes": _caption,
    "scenes-captions": _bare_caption,
    "scenes-questions": _question,
}
"""What scenes are asked for, by the word before the first colon."""

TASKS = {"scenes": "captions", "scenes-captions": "captions", "scenes-questions": "exact"}
"""What their records are judged by."""
