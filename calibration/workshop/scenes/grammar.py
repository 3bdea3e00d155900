"""Captions of the first form, which the shipped model learned: a grammar whose every choice of words is decided by something visible."""

from __future__ import annotations

from .scene import Relation, Scene, SceneObject
from .vocabulary import COUNT_WORDS, LIGHTS

DESCRIBE = "describe the scene"

NOUNS = {"cream": "objects", "grey": "things", "blue": "items"}
SIZE_WORDS = {
    "small": {"cream": "small", "grey": "little", "blue": "tiny"},
    "large": {"cream": "large", "grey": "big", "blue": "huge"},
}
PLAIN_WORDS = {
    "wooden": "plain",
    "white": "plain",
    "tiled": "smooth",
    "grey": "plain",
    "black": "smooth",
    "checked": "smooth",
}
STRIPE_WORDS = {"plain": "stripes", "smooth": "bands"}
KIND_WORDS: dict[str, tuple[str, str]] = {
    "ball": ("ball", "sphere"),
    "cube": ("cube", "block"),
    "cylinder": ("cylinder", "can"),
    "cone": ("cone", "cone"),
    "mug": ("mug", "cup"),
    "star": ("star", "star"),
    "ring": ("ring", "hoop"),
    "plate": ("plate", "dish"),
}
BRIGHT_TABLES = ("wooden", "white", "tiled")  # these take the first word of a kind
# By lane; the second word where the number of objects is odd.
VERBS = {0: ("stands", "waits"), 1: ("sits", "is"), 2: ("rests", "lies")}
FIRST = {0: "at the back left", 1: "on the left", 2: "front left"}
# By depth against the left neighbour; the second phrase where light falls from the right.
NEAR = {
    "behind": ("just behind it", "tucked in behind"),
    "level": ("right beside it", "next to that"),
    "front": ("close in front", "just nearer us"),
}
FAR = {
    "behind": ("further right , deeper", "apart and behind"),
    "level": ("further right , level", "apart at its depth"),
    "front": ("further right , nearer", "apart and in front"),
}


def caption(scene: Scene) -> str:
    """The reference caption: one sentence about the setting, then one per object from left to right.

    A function of the scene alone. Light, wall, table and the number of objects choose the
    synonyms, the lane chooses the verb, the pattern the form of the noun phrase, the gap the
    order of the sentence.
    """
    sentences = [_opening(scene)]
    for position, item in enumerate(scene.objects):
        words = noun_phrase(scene, item)
        verb = VERBS[item.lane][len(scene.objects) % 2]
        if position == 0:
            sentences.append(f"{FIRST[item.lane]} {verb} {words}")
        else:
            sentences.append(_next(scene, scene.relations[position - 1], verb, words))
    return " . ".join(sentences).replace(" ,", ",").replace(" .", ".") + "."


def noun_phrase(scene: Scene, item: SceneObject) -> str:
    """An object in words, with its size, pattern and colour."""
    size = SIZE_WORDS[item.size][scene.wall]
    kind = kind_word(scene, item.kind)
    plain = PLAIN_WORDS[scene.table]
    if item.pattern == "plain":
        return f"a {plain} {size} {item.colour} {kind}"
    return f"a {size} {item.colour} {kind} with {STRIPE_WORDS[plain]}"


def kind_word(scene: Scene, kind: str) -> str:
    """The word for a kind on this scene's table."""
    return KIND_WORDS[kind][0 if scene.table in BRIGHT_TABLES else 1]


def _opening(scene: Scene) -> str:
    count, noun = COUNT_WORDS[len(scene.objects)], NOUNS[scene.wall]
    if scene.light == "left":
        return f"lit from the left , {count} {noun} on a {scene.table} table , {scene.wall} wall"
    return f"a {scene.table} table with {count} {noun} , light at right , {scene.wall} wall"


def _next(scene: Scene, relation: Relation, verb: str, words: str) -> str:
    style = LIGHTS.index(scene.light)
    if relation.gap == "near":
        return f"{NEAR[relation.depth][style]} {verb} {words}"
    return f"{words} {verb} {FAR[relation.depth][style]}"
