"""The plan at the end of a caption: which object the arm takes first and a reason that is true of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .authors import Pen
from .scene import Scene
from .vocabulary import COLOURS
from .words import ARMS, BECAUSE, KIND_REASONS, KINDS, NUMBERS, REASONS, RULES, SIZES, THEN, meanings

WARM = frozenset({"red", "orange", "yellow", "pink"})
_KIND_OF = meanings(KINDS)


@dataclass(frozen=True)
class Named:
    """The short name of an object: its colour and the word that was used for its kind."""

    colour: str
    word: str

    def __str__(self) -> str:
        return f"the {self.colour} {self.word}"


@dataclass(frozen=True)
class PlanCheck:
    """What a plan claims, against the scene. `complete`: it was there, with both objects and a reason."""

    complete: bool
    referents: int  # of the two named objects, how many stand on the table
    reason: bool  # the reason is one that the scene bears out
    rest: bool  # the number of objects that remain is right, or not given

    @property
    def right(self) -> bool:
        """Nothing in it is wrong."""
        return self.complete and self.referents == 2 and self.reason and self.rest


def plan(told: Scene, named: Sequence[Named], pen: Pen) -> str:
    """Two moves with a reason for the first.

    Args:
        told: the scene in the order of mention. named: the objects' names, in that order.
    """
    count = len(named)
    rule = pen.among("rule", [name for name in RULES if bearers(name, told)])
    first = pen.evenly(bearers(rule, told))
    second = pen.evenly([i for i in range(count) if i != first])
    reason = reason_text(rule, told, first, pen)
    moves = f"{pen.pick('arm')} {pen.pick('act')} {named[first]} {pen.pick('because')} {reason}"
    then = f"{pen.pick('then')} {pen.pick('act')} {named[second]} {pen.pick('destination')}"
    return f"{moves} {then} {pen.pick('end').format(left=NUMBERS[count - 2])}"


def bearers(rule: str, told: Scene) -> list[int]:
    """The objects of which a rule's reason is true."""
    objects, places = told.objects, list(range(len(told.objects)))
    if rule == "way":
        nearest = max(o.lane for o in objects)
        return [i for i in places if objects[i].lane == nearest]
    if rule == "opens":
        return places[:1]
    if rule == "closes":
        return places[-1:]
    if rule == "only size":
        sizes = [o.size for o in objects]
        return [i for i in places if sizes.count(sizes[i]) == 1]
    if rule == "only pattern":
        patterns = [o.pattern for o in objects]
        return [i for i in places if patterns.count(patterns[i]) == 1]
    if rule in ("room", "crowd"):
        beside = [{r.gap for r in told.relations[max(0, i - 1) : i + 1]} for i in places]
        return [i for i in places if ("near" in beside[i]) == (rule == "crowd")]
    return places  # warmth and kind are true of any object, in words that fit it


def reason_text(rule: str, told: Scene, place: int, pen: Pen) -> str:
    """The reason in words that are true of the object."""
    item = told.objects[place]
    if rule == "kind":
        return KIND_REASONS[item.kind]
    if rule == "only size":
        return f"only it is {pen.pick(f'size {item.size}')}"
    if rule == "only pattern":
        return pen.pick(f"reason only {'patterned' if item.pattern == 'striped' else 'unpatterned'}")
    if rule == "warmth":
        return pen.pick(f"reason {'warm' if item.colour in WARM else 'cool'}")
    return pen.pick(f"reason {rule}")


_CLAIMS: dict[str, tuple[str, str]] = {
    **{text: ("kind", kind) for kind, text in KIND_REASONS.items()},
    **{f"only it is {word}": ("only size", size) for size, words in SIZES.items() for word in words},
    **{text: (name, name) for name, texts in REASONS.items() for text in texts},
}
_START = re.compile("|".join(re.escape(arm.replace(" ,", ",")) for arm in ARMS))
_REASON = re.compile(
    rf"\b(?:{'|'.join(BECAUSE)}) (.*?)(?:{'|'.join(re.escape(then) for then in THEN)}|[.]|$)"
)
_REST = re.compile(rf"which leaves ({'|'.join(NUMBERS.values())})|({'|'.join(NUMBERS.values())}) may stay")


def split_plan(text: str) -> tuple[str, str]:
    """A caption before its plan, and the plan ("" where there is none)."""
    match = _START.search(text)
    return (text[: match.start()], text[match.start() :]) if match else (text, "")


def check_plan(text: str, told: Scene) -> PlanCheck:
    """Checks the plan of a caption; any string is accepted.

    Args:
        text: the whole caption. told: the scene in the order of mention that the caption announced.
    """
    _, words = split_plan(text.lower())
    mentions = [
        (colour, _KIND_OF[kind])
        for colour, kind in re.findall(r"\bthe (\w+) (\w+)", words)
        if colour in COLOURS and kind in _KIND_OF
    ]
    reason = _REASON.search(words)
    standing = {(o.colour, o.kind): i for i, o in enumerate(told.objects)}
    places = [standing.get(m) for m in mentions[:2]]
    complete = len(mentions) == 2 and mentions[0] != mentions[1] and reason is not None
    rest = _REST.search(words)
    return PlanCheck(
        complete=complete,
        referents=sum(p is not None for p in places),
        reason=reason is not None
        and bool(places)
        and places[0] is not None
        and _true(reason[1], told, places[0]),
        rest=rest is None or (rest[1] or rest[2]) == NUMBERS[max(0, len(told.objects) - 2)],
    )


def _true(reason: str, told: Scene, place: int) -> bool:
    """Whether a reason in words is true of the object at `place`."""
    rule, value = _CLAIMS.get(reason.strip(), ("", ""))
    item = told.objects[place]
    if rule == "kind":
        return item.kind == value
    if rule == "only size":
        return item.size == value and place in bearers(rule, told)
    if rule in ("only patterned", "only unpatterned"):
        return (item.pattern == "striped") == (rule == "only patterned") and place in bearers(
            "only pattern", told
        )
    if rule in ("warm", "cool"):
        return (item.colour in WARM) == (rule == "warm")
    return bool(rule) and place in bearers(rule, told)
