"""Reads the facts back out of a caption of the first form; unknown words are skipped, missing facts stay None."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .grammar import FAR, KIND_WORDS, NEAR, SIZE_WORDS, STRIPE_WORDS
from .scene import Relation
from .vocabulary import COLOURS, COUNT_WORDS, TABLES, WALLS

_KIND_OF = {word: kind for kind, words in KIND_WORDS.items() for word in words}
_SIZE_OF = {word: size for size, words in SIZE_WORDS.items() for word in words.values()}
_PHRASES = [
    (phrase.replace(" ,", ","), Relation(gap, depth))
    for gap, table in (("near", NEAR), ("far", FAR))
    for depth, phrases in table.items()
    for phrase in phrases
]


@dataclass(frozen=True)
class ParsedObject:
    """One mention: what a sentence says about one object and its place beside the one before."""

    kind: str
    colour: str | None
    size: str | None
    pattern: str
    relation: Relation | None
    lane: int | None = None  # read from the second form only


@dataclass(frozen=True)
class ParsedCaption:
    """Everything a caption claims."""

    objects: tuple[ParsedObject, ...]
    count: int | None
    table: str | None
    wall: str | None
    light: str | None


def parse_caption(text: str) -> ParsedCaption:
    """Facts that ``text`` claims, in its own order; any string is accepted."""
    sentences = [s.strip() for s in text.lower().split(".") if s.strip()]
    objects = tuple(o for o in map(_object, sentences) if o is not None)
    setting = next((s for s in sentences if re.search(r"\btable\b", s)), "")
    words = re.findall(r"\w+", setting)
    counts = {word: number for number, word in COUNT_WORDS.items()}
    light = re.search(r"lit from the (left|right)|light at (left|right)", setting)
    return ParsedCaption(
        objects=objects,
        count=next((counts[w] for w in words if w in counts), None),
        table=next((t for t in TABLES if f"{t} table" in setting), None),
        wall=next((w for w in WALLS if f"{w} wall" in setting), None),
        light=(light[1] or light[2]) if light else None,
    )


def _object(sentence: str) -> ParsedObject | None:
    words = re.findall(r"\w+", sentence)
    kind = next((_KIND_OF[w] for w in words if w in _KIND_OF), None)
    if kind is None:
        return None
    return ParsedObject(
        kind=kind,
        colour=next((w for w in words if w in COLOURS), None),
        size=next((_SIZE_OF[w] for w in words if w in _SIZE_OF), None),
        pattern="striped" if any(w in STRIPE_WORDS.values() for w in words) else "plain",
        relation=next((r for phrase, r in _PHRASES if phrase in sentence), None),
    )
