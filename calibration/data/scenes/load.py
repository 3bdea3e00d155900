"""Records from the tabletop scene generator: pictures, pairs of pictures and films of its scenes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....runtime.common.errors import OptionError
from ...common import help_texts
from ..reading.records import ImageRef, Record
from .asking import DESCRIBE, Asked, ask
from .caption import tell
from .film import sample_film
from .film_asking import ask_film
from .film_story import DESCRIBE_FILM, tell_film
from .pair import ask_pair, sample_pair
from .scene import HELDOUT, TRAIN, VALIDATION, sample_scene

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
    options: dict[str, int | None] = dict.fromkeys(("count", "offset", "seed", "variant"))
    for place, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals and place == 0:
            name, value = "count", part
        if not part and place == 0:  # `scenes:train:` has always meant the default
            continue
        if name not in options or not value.isdecimal() or len(value) > 9:
            raise OptionError(f"scenes:{text}: {part!r} is no part of scenes:{help_texts.SCENES}")
        if options[name] is not None:
            raise OptionError(f"scenes:{text}: {name} is given twice")
        options[name] = int(value)
    offset, seed, variant = (options[name] or 0 for name in ("offset", "seed", "variant"))
    count = min(_DEFAULT_COUNT, len(span) - offset) if options["count"] is None else options["count"]
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
    return _asked(ask(sample_scene(seed, index), variant), "picture", seed, index, variant)


def _story(seed: int, index: int, variant: int) -> Record:
    text = tell_film(sample_film(seed, index), variant).text
    film = ImageRef(scene=(seed, index), shown="film")
    return Record(f"{_key(seed, index, variant)}-film", DESCRIBE_FILM, film, text, references=(text,))


def _film_question(seed: int, index: int, variant: int) -> Record:
    return _asked(ask_film(sample_film(seed, index), variant), "film", seed, index, variant)


def _pair_question(seed: int, index: int, variant: int) -> Record:
    return _asked(ask_pair(sample_pair(seed, index), variant), "pair", seed, index, variant)


def _asked(asked: Asked, shown: str, seed: int, index: int, variant: int) -> Record:
    key = _key(seed, index, variant) + ("" if shown == "picture" else f"-{shown}") + f"-{asked.kind}"
    seen = ImageRef(scene=(seed, index), shown=shown)
    return Record(key, asked.text, seen, asked.answer, references=(asked.answer,))


FORMS: dict[str, Callable[[int, int, int], Record]] = {
    "scenes": _caption,
    "scenes-captions": _bare_caption,
    "scenes-questions": _question,
    "films": _story,
    "films-questions": _film_question,
    "pairs-questions": _pair_question,
}
"""What scenes are asked for, by the word before the first colon."""

TASKS = dict.fromkeys(FORMS, "exact") | dict.fromkeys(("scenes", "scenes-captions", "films"), "captions")
"""What their records are judged by."""
