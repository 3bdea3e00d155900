"""Pairs of pictures: a scene, and the same one with a single change, in either order; questions that need both."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from .asking import REPLIES, Asked, named_object
from .authors import Pen
from .caption import tidy
from .scene import LANE_COUNT, Scene, in_lane, mirror, sample_scene, split_of, with_objects
from .vocabulary import COLOURS, UNSEEN

CHANGES = ("colour", "lane", "missing", "mirrored")

PAIR_QUESTIONS: dict[str, tuple[str, ...]] = {
    "differs": ("what differs?", "which object is not the same in both pictures?"),
    "fuller": ("which picture has more objects?", "in which picture are there more objects?"),
    "holds": ("which picture has a {colour} {kind}?", "in which picture is there a {colour} {kind}?"),
    "beside": (
        "in which picture is the {kind} left of the {other}?",
        "which picture has the {kind} left of the {other}?",
    ),
    "colour in first": ("what colour is the {kind} in the first picture?",),
    "colour in second": ("what colour is the {kind} in the second picture?",),
}
PAIR_REPLIES: dict[str, tuple[str, ...]] = {
    "which": ("{value}", "i think {value}"),
    "differs": ("the {value}", "it is the {value}"),
}
WHICH: dict[tuple[bool, bool], tuple[str, ...]] = {
    (True, False): ("the first", "picture one"),
    (False, True): ("the second", "picture two"),
    (True, True): ("both",),
    (False, False): ("neither",),
}
_WHICH_OF = {
    "first": "first",
    "one": "first",
    "second": "second",
    "two": "second",
    "both": "both",
    "neither": "neither",
}


@dataclass(frozen=True)
class Pair:
    """Two pictures. `change`: one of `CHANGES`; `place`: the changed object in the scene that has all of them."""

    scenes: tuple[Scene, Scene]
    change: str
    place: int
    swapped: bool  # the changed scene comes first


def sample_pair(seed: int, index: int) -> Pair:
    """The pair number ``index`` of world ``seed``, of the scene of that number.

    Raises:
        ValueError: ``index`` belongs to no split.
    """
    scene, rng = sample_scene(seed, index), np.random.default_rng([seed, index, 307])
    change = CHANGES[int(rng.integers(len(CHANGES)))]
    place = int(rng.integers(len(scene.objects)))
    objects, item = list(scene.objects), scene.objects[place]
    if change == "colour":
        taken = {(o.colour, o.kind) for o in objects} | (set() if split_of(index) == "heldout" else UNSEEN)
        free = [colour for colour in COLOURS if (colour, item.kind) not in taken]
        objects[place] = replace(item, colour=free[int(rng.integers(len(free)))])
    elif change == "lane":
        objects[place] = in_lane(item, (item.lane + int(rng.integers(1, LANE_COUNT))) % LANE_COUNT)
    elif change == "missing":
        del objects[place]
    other = mirror(scene) if change == "mirrored" else with_objects(scene, objects)
    swapped = bool(rng.integers(2))
    return Pair((other, scene) if swapped else (scene, other), change, place, swapped)


def ask_pair(pair: Pair, variant: int = 0) -> Asked:
    """The question that (pair, variant) draws: every type that the pair allows is as likely as the others."""
    scene = pair.scenes[0]
    key = [scene.seed, scene.index, variant]
    rng = np.random.default_rng([*key, 311])
    facts = pair_facts(pair)
    types = sorted({kind for kind, *_ in facts})
    chosen = types[int(rng.integers(len(types)))]
    options = [fact for fact in facts if fact[0] == chosen]
    kind, colour, subject, other = options[int(rng.integers(len(options)))]
    return _worded(kind, colour, subject, other, facts[kind, colour, subject, other], Pen([*key, 4]))


def pair_facts(pair: Pair) -> dict[tuple[str, str, str, str], str]:
    """All that can be asked: (type of the question, the colour, kind and other kind that it names) to the value of its
    answer. Which types a change allows is such that no answer to any is the usual one."""
    facts: dict[tuple[str, str, str, str], str] = {}
    names = [[(o.colour, o.kind) for o in scene.objects] for scene in pair.scenes]
    kinds = [[kind for _, kind in list_] for list_ in names]
    item = pair.scenes[pair.swapped].objects[pair.place]
    if pair.change != "mirrored" and all(k.count(item.kind) <= 1 for k in kinds):
        facts["differs", "", "", ""] = item.kind
    if pair.change in ("missing", "lane"):
        facts["fuller", "", "", ""] = _which(len(kinds[0]) > len(kinds[1]), len(kinds[1]) > len(kinds[0]))
    # What is in neither shares its colour with one object and its kind with another.
    mixed = [(c, k) for c, _ in names[0] for _, k in names[0] if (c, k) not in names[0] + names[1]]
    changed = [name for name in names[0] + names[1] if name not in names[0] or name not in names[1]]
    for colour, kind in [*(changed or names[0]), *mixed[:2]]:
        facts["holds", colour, kind, ""] = _which((colour, kind) in names[0], (colour, kind) in names[1])
    common = [k for k in kinds[0] if kinds[0].count(k) == kinds[1].count(k) == 1]
    if pair.change in ("mirrored", "lane"):
        for one, other in permutations(common, 2):
            facts["beside", "", one, other] = _which(*(k.index(one) < k.index(other) for k in kinds))
    if pair.change == "colour" and item.kind in common:
        for name, scene in zip(("first", "second"), pair.scenes, strict=True):
            colour = next(o.colour for o in scene.objects if o.kind == item.kind)
            facts[f"colour in {name}", "", item.kind, ""] = colour
    return facts


def pair_answer_value(kind: str, text: str) -> str | None:
    """What an answer to a question of this type says; None where it says nothing, or two things at once."""
    words = re.findall(r"\w+", text.lower())
    if kind == "differs":
        named = named_object([*words, next(iter(COLOURS))])  # it names no colour
        return named.split()[1] if named else None
    table = {c: c for c in COLOURS} if kind.startswith("colour") else _WHICH_OF
    values = {table[word] for word in words if word in table}
    return values.pop() if len(values) == 1 else None


def every_pair_text() -> Collection[str]:
    """All forms of questions and answers, for the vocabulary of a tokenizer."""
    tables = (PAIR_QUESTIONS, PAIR_REPLIES, WHICH)
    return [text for table in tables for forms in table.values() for text in forms]


def _which(first: bool, second: bool) -> str:
    return _WHICH_OF[WHICH[first, second][0].split()[-1]]


def _worded(kind: str, colour: str, subject: str, other: str, value: str, pen: Pen) -> Asked:
    words = {"colour": colour, "kind": pen.pick(f"kind {subject}") if subject else ""}
    words["other"] = pen.pick(f"kind {other}") if other else ""
    question = pen.pick(f"ask pair {kind}", PAIR_QUESTIONS[kind]).format(**words)
    before = pen.nats
    if kind == "differs":
        form, said = pen.pick("reply pair differs", PAIR_REPLIES["differs"]), pen.pick(f"kind {value}")
    elif kind.startswith("colour"):
        form, said = pen.pick("reply colour", REPLIES["colour"]), value
    else:
        names = next(names for names in WHICH.values() if _WHICH_OF[names[0].split()[-1]] == value)
        form, said = pen.pick("reply pair which", PAIR_REPLIES["which"]), pen.pick(f"pair {value}", names)
    answer = form.format(value=said, kind=words["kind"])
    return Asked(kind, tidy(question), tidy(answer), value, pen.nats - before)
