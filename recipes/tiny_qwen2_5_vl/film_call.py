"""The roll call of a film: what becomes of every kind of object, in any order, and how many there are. See `roll_call`."""

from __future__ import annotations

import numpy as np
from vlmexport.calibration.data.scenes.film import Film
from vlmexport.calibration.data.scenes.film_words import CHANGES, DEEDS, SPOTS
from vlmexport.calibration.data.scenes.words import KINDS, NUMBERS


def film_call(film: Film, variant: int) -> str:
    """The objects whose kind is the only one, in an order and in words that (film, variant) draws; then how many of the first
    ones remain, and by how many they are more or fewer."""
    scene = film.scene
    rng = np.random.default_rng([scene.seed, scene.index, variant, 311])

    def one(words: tuple[str, ...]) -> str:
        return words[int(rng.integers(len(words)))]

    happened = {event.place: event for event in film.events}
    kinds = [item.kind for item in scene.objects]
    lines = []
    for place in rng.permutation(len(kinds)).tolist():
        item, event = scene.objects[place], happened.get(place)
        if kinds.count(item.kind) == 1:
            deed = "is there" if event is None else one(DEEDS[event.kind])
            if event is not None and event.kind == "move":
                deed += f" from {one(SPOTS[item.lane])} to {one(SPOTS[event.lane])}"
            lines.append(f"{one(KINDS[item.kind])} {item.colour} {deed}.")
    start, end = film.places(0), film.places(film.count - 1)
    remain, change = len(set(start) & set(end)), len(end) - len(start)
    return " ".join([*lines, f"{NUMBERS[remain]} of them, {CHANGES[change]}."])
