"""Questions and answers: several ways to ask, several ways to reply, one value."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from .authors import Pen
from .caption import tidy
from .scene import Scene
from .vocabulary import COLOURS
from .words import KINDS, LANES, NUMBERS, SIZES, TABLES, WALLS, meanings

DESCRIBE = "describe the scene"
"""The prompt that asks for a caption."""

QUESTIONS: dict[str, tuple[str, ...]] = {
    "count": ("how many objects are there?", "how many things do you see?", "count the objects."),
    "striped": ("how many of them are striped?", "how many objects have stripes?"),
    "light": ("where does the light come from?", "which side is the lamp on?"),
    "table": ("what is the table like?", "describe the table."),
    "wall": ("what colour is the wall?", "which colour does the wall have?"),
    "colour": ("what colour is the {kind}?", "which colour does the {kind} have?"),
    "size": ("what size is the {kind}?", "how big is the {kind}?"),
    "pattern": ("is the {kind} striped?", "does the {kind} have stripes?"),
    "lane": ("where on the table is the {kind}?", "how far back is the {kind}?"),
    "left": ("what is left of the {kind}?", "which object is on the left of the {kind}?"),
    "right": ("what is right of the {kind}?", "which object is on the right of the {kind}?"),
    "exists": ("is there a {colour} {kind}?", "do you see a {colour} {kind}?"),
}
_QUALITY = ("{value}", "it is {value}", "{value} , i think")
REPLIES: dict[str, tuple[str, ...]] = {
    "number": ("{value}", "i count {value}", "{value} in all"),
    "light": ("{value}", "from the {value}", "it comes from the {value}"),
    "wall": ("{value}", "the wall is {value}", "{value} , i think"),
    "table": ("{value}", "the table is {value}", "a {value} one"),
    "colour": (*_QUALITY, "the {kind} is {value}"),
    "size": (*_QUALITY, "the {kind} is {value}"),
    "lane": (*_QUALITY, "the {kind} is {value}"),
    "neighbour": ("a {value}", "the {value}", "it is a {value}"),
    "nothing": ("nothing", "nothing at all"),
    "striped": ("yes", "yes , it has stripes", "yes , it does"),
    "plain": ("no", "no , it is plain", "no , it does not"),
    "there": ("yes", "yes , there is", "yes , i do"),
    "absent": ("no", "no , there is none", "no , i do not"),
}
_KIND_OF, _SIZE_OF = meanings(KINDS), meanings(SIZES)
_TABLE_OF, _WALL_OF = meanings(TABLES), meanings(WALLS)
_NUMBER_OF = {word: str(number) for number, word in NUMBERS.items()}
_LANE_OF = {word: str(lane) for lane, phrases in enumerate(LANES) for word in phrases}


@dataclass(frozen=True)
class Asked:
    """A question with one of its right answers. `value`: what every right answer says, as `answer_value` reads it."""

    kind: str
    text: str
    answer: str
    value: str
    nats: float  # -log of the exact probability of the answer, given the question and the author's question


@dataclass(frozen=True)
class _Fact:
    kind: str
    subject: str  # the kind asked about, "" for none
    colour: str  # of an `exists` question
    value: str


def ask(scene: Scene, variant: int = 0) -> Asked:
    """The question that (scene, variant) draws: every type that the scene allows is as likely as the others."""
    rng = np.random.default_rng([scene.seed, scene.index, variant, 103])
    facts = _facts(scene, rng)
    types = sorted({fact.kind for fact in facts})
    chosen = types[int(rng.integers(len(types)))]
    options = [fact for fact in facts if fact.kind == chosen]
    return _worded(options[int(rng.integers(len(options)))], Pen([scene.seed, scene.index, variant, 1]))


def answer_value(kind: str, text: str) -> str | None:
    """What an answer to a question of this type says; None where it says nothing, or two things at once."""
    text = text.lower()
    words = re.findall(r"\w+", text)
    if kind in ("left", "right"):
        return "nothing" if "nothing" in words else named_object(words)
    if kind == "lane":
        values = {value for phrase, value in _LANE_OF.items() if phrase in text}
    elif kind in ("pattern", "exists"):
        values = set(words) & {"yes", "no"}
    elif kind == "light":
        values = set(words) & {"left", "right"}
    else:
        table = {"colour": {c: c for c in COLOURS}, "size": _SIZE_OF, "table": _TABLE_OF, "wall": _WALL_OF}
        table = table.get(kind, _NUMBER_OF)
        values = {table[w] for w in words if w in table}
    return values.pop() if len(values) == 1 else None


def named_object(words: Collection[str]) -> str | None:
    """Colour and kind of the one object that is named; None for none, or for several."""
    colours, kinds = {w for w in words if w in COLOURS}, {_KIND_OF[w] for w in words if w in _KIND_OF}
    return f"{colours.pop()} {kinds.pop()}" if len(colours) == len(kinds) == 1 else None


def _facts(scene: Scene, rng: np.random.Generator) -> list[_Fact]:
    """Everything that can be asked; a kind is named only where it is unique."""
    objects = scene.objects
    kinds = [o.kind for o in objects]
    facts = [
        _Fact("count", "", "", str(len(objects))),
        _Fact("striped", "", "", str(sum(o.pattern == "striped" for o in objects))),
        _Fact("light", "", "", scene.light),
        _Fact("table", "", "", scene.table),
        _Fact("wall", "", "", scene.wall),
    ]
    for place, item in enumerate(objects):
        if kinds.count(item.kind) > 1:
            continue
        values = {
            "colour": item.colour,
            "size": item.size,
            "pattern": "yes" if item.pattern == "striped" else "no",
            "lane": str(item.lane),
        }
        for name, at in (("left", place - 1), ("right", place + 1)):
            beside = objects[at] if 0 <= at < len(objects) else None
            values[name] = f"{beside.colour} {beside.kind}" if beside else "nothing"
        facts += [_Fact(kind, item.kind, "", value) for kind, value in values.items()]
    pairs = {(o.colour, o.kind) for o in objects}
    some = objects[int(rng.integers(len(objects)))]
    facts.append(_Fact("exists", some.kind, some.colour, "yes"))
    # What is absent shares the colour or the kind with something that is there, or the question is too easy.
    absent = [(o.colour, k) for o in objects for k in KINDS] + [(c, o.kind) for o in objects for c in COLOURS]
    absent = [pair for pair in absent if pair not in pairs]
    colour, kind = absent[int(rng.integers(len(absent)))]
    facts.append(_Fact("exists", kind, colour, "no"))
    return facts


def _worded(fact: _Fact, pen: Pen) -> Asked:
    kind = pen.pick(f"kind {fact.subject}") if fact.subject else ""
    question = pen.pick(f"ask {fact.kind}", QUESTIONS[fact.kind]).format(kind=kind, colour=fact.colour)
    before = pen.nats
    reply, value = _reply(fact, pen)
    form = pen.pick(f"reply {reply}", REPLIES[reply])
    answer = form.format(value=value, kind=kind)
    return Asked(fact.kind, tidy(question), tidy(answer), fact.value, pen.nats - before)


def _reply(fact: _Fact, pen: Pen) -> tuple[str, str]:
    """The group of reply forms and the value in words."""
    if fact.kind in ("count", "striped"):
        return "number", NUMBERS[int(fact.value)]
    if fact.kind == "exists":
        return ("there" if fact.value == "yes" else "absent"), ""
    if fact.kind == "pattern":
        return ("striped" if fact.value == "yes" else "plain"), ""
    if fact.kind in ("left", "right"):
        if fact.value == "nothing":
            return "nothing", ""
        colour, kind = fact.value.split()
        return "neighbour", f"{colour} {pen.pick(f'kind {kind}')}"
    if fact.kind in ("size", "lane", "table", "wall"):
        return fact.kind, pen.pick(f"{fact.kind} {fact.value}")
    return fact.kind, fact.value


def every_text() -> Collection[str]:
    """All forms of questions and answers, for the vocabulary of a tokenizer."""
    return [text for table in (QUESTIONS, REPLIES) for forms in table.values() for text in forms]
