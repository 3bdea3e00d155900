"""Reads the facts back out of a caption; what is missing or unknown stays None."""

from __future__ import annotations

import re

from .caption import in_order
from .plan import PlanCheck, check_plan, split_plan
from .scene import Relation, Scene
from .score import CaptionScore, ParsedCaption, ParsedObject, score_parsed
from .vocabulary import COLOURS
from .words import DEPTHS, GAPS, KINDS, LANES, NUMBERS, ORDERS, PATTERNS, SIZES, TABLES, WALLS, meanings

_KIND_OF, _SIZE_OF, _PATTERN_OF = meanings(KINDS), meanings(SIZES), meanings(PATTERNS)
_TABLE_OF, _WALL_OF = meanings(TABLES), meanings(WALLS)
_NUMBER_OF = {word: number for number, word in NUMBERS.items()}
_CLAUSE = re.compile(r"\.|;\s*next\b|,\s*and\b|:")


def read_caption(text: str) -> ParsedCaption:
    """Facts that `text` claims, its objects from left to right whatever the order of mention."""
    head, _ = split_plan(text.lower())
    order = announced(head)
    setting, _, body = head.partition(".")
    mentions = [m for m in map(mention_of, _CLAUSE.split(body)) if m is not None]
    if order == "backward":
        mentions = _reversed(mentions)
    words = re.findall(r"\w+", setting)
    side = [w for w in words if w in ("left", "right")]
    return ParsedCaption(
        objects=tuple(mentions),
        count=next((_NUMBER_OF[w] for w in words if w in _NUMBER_OF), None),
        table=next((_TABLE_OF[w] for w in words if w in _TABLE_OF), None),
        wall=next((_WALL_OF[w] for w in words if w in _WALL_OF), None),
        light=side[0] if side else None,
    )


def announced(text: str) -> str:
    """The order of mention: "backward" where the text says so, else "forward"."""
    return "backward" if any(phrase in text for phrase in ORDERS["backward"]) else "forward"


def score_told(text: str, scene: Scene) -> CaptionScore:
    """`score_parsed` of a caption."""
    return score_parsed(read_caption(text), scene)


def check_told_plan(text: str, scene: Scene) -> PlanCheck:
    """`check_plan` in the order of mention that the caption itself announces."""
    return check_plan(text, in_order(scene, announced(text.lower())))


def mention_of(clause: str) -> ParsedObject | None:
    """What a clause says of the object that it names; None where it names none."""
    words = re.findall(r"\w+", clause)
    kind = next((_KIND_OF[w] for w in words if w in _KIND_OF), None)
    if kind is None:
        return None
    gap = next((name for name, phrases in GAPS.items() if any(_has(clause, p) for p in phrases)), None)
    depth = next((name for name, phrases in DEPTHS.items() if any(_has(clause, p) for p in phrases)), None)
    return ParsedObject(
        kind=kind,
        colour=next((w for w in words if w in COLOURS), None),
        size=next((_SIZE_OF[w] for w in words if w in _SIZE_OF), None),
        pattern=next((_PATTERN_OF[w] for w in words if w in _PATTERN_OF), "plain"),
        relation=Relation(gap, depth) if gap and depth else None,
        lane=next(
            (lane for lane, phrases in enumerate(LANES) if any(_has(clause, p) for p in phrases)), None
        ),
    )


def _has(clause: str, phrase: str) -> bool:
    return re.search(rf"\b{phrase}\b", clause) is not None


def _reversed(mentions: list[ParsedObject]) -> list[ParsedObject]:
    """Mentions from right to left as mentions from left to right: the relation moves to the right partner."""
    turned = {"behind": "front", "front": "behind", "level": "level"}
    result = []
    for at in range(len(mentions) - 1, -1, -1):
        link = mentions[at + 1].relation if at + 1 < len(mentions) else None
        relation = Relation(link.gap, turned[link.depth]) if link else None
        item = mentions[at]
        result.append(ParsedObject(item.kind, item.colour, item.size, item.pattern, relation, item.lane))
    return result
