"""Captions: a setting, every object against the one named before, and a plan of the arm."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .authors import Pen
from .plan import Named, plan
from .scene import Relation, Scene, SceneObject, mirror
from .words import NUMBERS


@dataclass(frozen=True)
class Told:
    """One text. `nats`: -log of its exact probability given the scene, summed over the authors."""

    text: str
    author: int
    nats: float


def tell(scene: Scene, variant: int = 0) -> Told:
    """The caption that (scene, variant) draws.

    Two scenes of one (seed, index), the plain and the mirrored one, use the same author for the same variant.
    """
    pen = Pen([scene.seed, scene.index, variant])
    return Told(tidy(write(scene, pen)), pen.author, pen.nats)


def write(scene: Scene, pen: Pen) -> str:
    """A caption as words and marks between single spaces."""
    things = pen.pick("things")
    parts = [opening(scene, pen, things), pen.pick("remark"), "."]
    order = pen.pick("order")
    parts += [pen.pick(f"order {order}"), ":"]
    told = in_order(scene, order)
    named: list[Named] = []
    for position, item in enumerate(told.objects):
        relation = told.relations[position - 1] if position else None
        sentence, name = clause(item, relation, pen)
        parts += [sentence, pen.pick("join") if position + 1 < len(told.objects) else "."]
        named.append(name)
    parts.append(plan(told, named, pen))
    return " ".join(part for part in parts if part)


def in_order(scene: Scene, order: str) -> Scene:
    """The scene whose objects run in the order of mention; only objects and relations of it count."""
    return scene if order == "forward" else mirror(scene)


def opening(scene: Scene, pen: Pen, things: str) -> str:
    """Number, table, wall and light."""
    return pen.pick("opening").format(
        table=pen.pick(f"table {scene.table}"),
        count=NUMBERS[len(scene.objects)],
        things=things,
        wall=pen.pick(f"wall {scene.wall}"),
        light=pen.pick("light").format(side=scene.light),
    )


def clause(item: SceneObject, relation: Relation | None, pen: Pen) -> tuple[str, Named]:
    """What is said of one object, and the name that the plan calls it by.

    Args:
        item: the object. relation: to the object named before; None for the first, which gets its lane instead.
    """
    words, name = noun_phrase(item, pen)
    lane = pen.pick(f"lane {item.lane}") if relation is None or pen.pick("lane too") == "yes" else ""
    place = lane
    if relation is not None:
        place = f"{pen.pick(f'gap {relation.gap}')} {pen.pick(f'depth {relation.depth}')}"
    verb, hedge = pen.pick("verb"), pen.pick("hedge")
    if pen.pick("sequence") == "place first":
        sentence = f"{place} {hedge} {verb} {words}"
    elif verb == "we find":
        sentence = f"{hedge} {verb} {words} {place}"
    else:
        sentence = f"{hedge} {words} {verb} {place}"
    if relation is not None and lane:
        sentence += f" , {lane}"
    return " ".join(sentence.split()), name


def noun_phrase(item: SceneObject, pen: Pen) -> tuple[str, Named]:
    """An object with its size, pattern, colour and kind, and its short name."""
    kind, pattern = pen.pick(f"kind {item.kind}"), pen.pick(f"pattern {item.pattern}")
    before = pattern[:-1] + " " if pattern.endswith("-") else ""
    after = "" if before or not pattern else " " + pattern
    words = pen.pick("phrase").format(
        size=pen.pick(f"size {item.size}"), before=before, colour=item.colour, kind=kind, after=after
    )
    return words, Named(item.colour, kind)


def tidy(words: str) -> str:
    """Marks attached to the words before them, and "an" before a vowel (no word of the world is an exception)."""
    words = re.sub(r" ([.,:;?])", r"\1", words)
    return re.sub(r"\ba (?=[aeio])", "an ", words)
