"""Questions about films that no single frame answers: what moved, appeared, left, in which order, how the number changed."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from .asking import Asked, named_object
from .authors import Pen
from .caption import tidy
from .film import Event, Film
from .film_story import choose, deed_of, name_of, route, route_of
from .film_words import CHANGES, FILM_QUESTIONS, FILM_REPLIES, FILM_SLOTS
from .scene import free_place
from .words import NUMBERS

_OF_KIND = {"moved": "move", "appeared": "appear", "left": "leave"}
_NUMBER_OF = {word: str(number) for number, word in NUMBERS.items()}


def ask_film(film: Film, variant: int = 0) -> Asked:
    """The question that (film, variant) draws: every type that the film allows is as likely as the others."""
    key = [film.scene.seed, film.scene.index, variant]
    rng = np.random.default_rng([*key, 223])
    facts = film_facts(film)
    types = sorted({kind for kind, _ in facts})
    chosen = types[int(rng.integers(len(types)))]
    subjects = [subject for kind, subject in facts if kind == chosen]
    subject = subjects[int(rng.integers(len(subjects)))]
    return _worded(film, chosen, subject, facts[chosen, subject], Pen([*key, 2]))


def film_facts(film: Film) -> dict[tuple[str, str], str]:
    """All that can be asked of a film: (type of the question, kind that it names, "" for none) to the value of its
    answer."""
    facts: dict[tuple[str, str], str] = {}
    for name, kind in _OF_KIND.items():
        happened = [e for e in film.events if e.kind == kind]
        # On a full table nothing more can appear, or have left: one frame would tell that nothing did.
        if len(happened) == 1 or (not happened and (kind == "move" or free_place(film.scene) is not None)):
            facts[name, ""] = name_of(film, happened[0].place) if happened else "nothing"
    kinds = [item.kind for item in film.scene.objects]
    for event in film.events:
        item = film.scene.objects[event.place]
        if event.kind == "move" and kinds.count(item.kind) == 1:
            facts["path", item.kind] = f"{item.lane}>{event.lane}"
    start, end = film.places(0), film.places(film.count - 1)
    facts["change", ""] = str(len(end) - len(start))
    facts["remain", ""] = str(len(set(start) & set(end)))
    if len(film.events) > 1:
        for name, event in (("first", film.events[0]), ("last", film.events[-1])):
            facts[name, ""] = f"{event.kind} {name_of(film, event.place)}"
    return facts


def film_answer_value(kind: str, text: str) -> str | None:
    """What an answer to a question of this type says; None where it says nothing, or two things at once."""
    text = text.lower()
    words = re.findall(r"\w+", text)
    if kind == "path":
        return route_of(text)
    if kind == "change":
        values = {str(number) for number, phrase in CHANGES.items() if phrase in text}
    elif kind == "remain":
        values = {_NUMBER_OF[word] for word in words if word in _NUMBER_OF}
    elif kind in ("first", "last"):
        deed, name = deed_of(text), named_object(words)
        return f"{deed} {name}" if deed and name else None
    else:
        return "nothing" if "nothing" in words else named_object(words)
    return values.pop() if len(values) == 1 else None


def _worded(film: Film, kind: str, subject: str, value: str, pen: Pen) -> Asked:
    word = pen.pick(f"kind {subject}") if subject else ""
    question = pen.pick(f"ask film {kind}", FILM_QUESTIONS[kind]).format(kind=word)
    before = pen.nats
    group, said = _said(film, kind, value, pen)
    answer = pen.pick(f"reply film {group}", FILM_REPLIES[group]).format(value=said)
    return Asked(kind, tidy(question), tidy(answer), value, pen.nats - before)


def _said(film: Film, kind: str, value: str, pen: Pen) -> tuple[str, str]:
    """The group of reply forms and the value in words."""
    if kind == "path":
        start, end = map(int, value.split(">"))
        return "path", route(start, end, pen)
    if kind == "change":
        return "change", CHANGES[int(value)]
    if kind == "remain":
        return "remain", NUMBERS[int(value)]
    if kind in ("first", "last"):
        event: Event = film.events[0 if kind == "first" else -1]
        return "event", f"{_name(film, event.place, pen)} {choose(pen, f'film {event.kind}')}"
    if value == "nothing":
        return "film nothing", ""
    happened = next(e for e in film.events if e.kind == _OF_KIND[kind])
    return "film object", _name(film, happened.place, pen)


def _name(film: Film, place: int, pen: Pen) -> str:
    item = film.scene.objects[place]
    return f"{item.colour} {pen.pick(f'kind {item.kind}')}"


def every_film_text() -> Collection[str]:
    """All forms of stories, questions and answers, for the vocabulary of a tokenizer."""
    tables = (FILM_SLOTS, FILM_QUESTIONS, FILM_REPLIES)
    return [*CHANGES.values(), *(text for table in tables for forms in table.values() for text in forms)]
