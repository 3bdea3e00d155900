"""A text that is learned and never asked for later: the objects of a picture in any order, each by its kind, then all else.

A question names a kind, and its answer is what the picture shows there. Captions do not teach to look a kind up, for they go from
place to place; and of a question and its answer seventeen tokens are one such look, here two or three. The colour stands right behind
the kind: one layer of attention finds it.
"""

from __future__ import annotations

import numpy as np
from vlmexport.calibration.data.scenes.scene import Scene
from vlmexport.calibration.data.scenes.words import KINDS, LANES, SIZES

PROMPT = "list all"


def roll_call(scene: Scene, variant: int) -> str:
    """The objects whose kind is the only one, in an order and in words that (scene, variant) draws; some scenes have none."""
    rng = np.random.default_rng([scene.seed, scene.index, variant, 307])

    def one(words: tuple[str, ...]) -> str:
        return words[int(rng.integers(len(words)))]

    def beside(place: int) -> str:
        if not 0 <= place < len(scene.objects):
            return "nothing"
        return f"a {scene.objects[place].colour} {one(KINDS[scene.objects[place].kind])}"

    kinds = [item.kind for item in scene.objects]
    lines = []
    for place in rng.permutation(len(kinds)).tolist():
        item = scene.objects[place]
        if kinds.count(item.kind) == 1:
            lines.append(
                f"{one(KINDS[item.kind])} {item.colour} {one(SIZES[item.size])} {item.pattern} {one(LANES[item.lane])} "
                f"left {beside(place - 1)} right {beside(place + 1)}."
            )
    return " ".join(lines)
