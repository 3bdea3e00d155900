"""Questions of the first form, which the shipped model learned: short answers that the picture shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .scene import Scene
from .vocabulary import COLOURS, COUNT_WORDS, KINDS


@dataclass(frozen=True)
class Question:
    """One question with its answer and its type."""

    kind: str
    text: str
    answer: str


def questions(scene: Scene) -> tuple[Question, ...]:
    """All questions of a scene, in a fixed order; kinds are named only where they are unique."""
    rng = np.random.default_rng([scene.seed, scene.index, 1])
    objects = scene.objects
    found = [
        Question("count", "how many objects are there?", COUNT_WORDS[len(objects)]),
        Question("light", "where does the light come from?", scene.light),
        Question("table", "what is the table like?", scene.table),
        Question("wall", "what colour is the wall?", scene.wall),
    ]
    kinds = [o.kind for o in objects]
    for position, item in enumerate(objects):
        if kinds.count(item.kind) > 1:
            continue
        left = objects[position - 1] if position else None
        right = objects[position + 1] if position + 1 < len(objects) else None
        found += [
            Question("colour", f"what colour is the {item.kind}?", item.colour),
            Question("size", f"what size is the {item.kind}?", item.size),
            Question("pattern", f"is the {item.kind} striped?", "yes" if item.pattern == "striped" else "no"),
            Question(
                "left",
                f"what is left of the {item.kind}?",
                f"a {left.colour} {left.kind}" if left else "nothing",
            ),
            Question(
                "right",
                f"what is right of the {item.kind}?",
                f"a {right.colour} {right.kind}" if right else "nothing",
            ),
        ]
    some = objects[int(rng.integers(len(objects)))]
    found.append(Question("exists", f"is there a {some.colour} {some.kind}?", "yes"))
    pairs = {(o.colour, o.kind) for o in objects}
    while True:
        colour, kind = str(rng.choice(tuple(COLOURS))), str(rng.choice(KINDS))
        if (colour, kind) not in pairs:
            break
    found.append(Question("exists", f"is there a {colour} {kind}?", "no"))
    return tuple(found)
