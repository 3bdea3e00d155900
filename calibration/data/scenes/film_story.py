"""What happens in a film, told: the table at the start, every event in its order, and how many objects there are in the end."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .authors import Pen
from .caption import Told, noun_phrase, opening, tidy
from .film import Event, Film
from .film_words import DEEDS, FILM_SLOTS, SPOTS
from .plan import Named
from .reading import mention_of
from .score import ParsedObject
from .words import NUMBERS

DESCRIBE_FILM = "describe what happens"
"""The prompt that asks for the story of a film."""


def tell_film(film: Film, variant: int = 0) -> Told:
    """The story that (film, variant) draws."""
    pen = Pen([film.scene.seed, film.scene.index, variant, 3])
    return Told(tidy(write_film(film, pen)), pen.author, pen.nats)


def write_film(film: Film, pen: Pen) -> str:
    """A story as words and marks between single spaces."""
    frames = film.frames
    parts = [opening(frames[0], pen, pen.pick("things")), ".", choose(pen, "film row"), ":"]
    named: dict[int, Named] = {}
    there = film.places(0)
    for position, place in enumerate(there):
        words, named[place] = noun_phrase(film.scene.objects[place], pen)
        parts += [words, pen.pick(f"lane {film.scene.objects[place].lane}")]
        parts.append(choose(pen, "film join") if position + 1 < len(there) else ".")
    for number, event in enumerate(film.events):
        parts += [choose(pen, "film next" if number else "film begin"), _told(event, film, named, pen)]
        parts.append(choose(pen, "film stop") if number + 1 < len(film.events) else ".")
    parts.append(choose(pen, "film end").format(left=NUMBERS[len(frames[-1].objects)]))
    return " ".join(parts)


def choose(pen: Pen, slot: str) -> str:
    """`Pen.pick` of a slot of films."""
    return pen.pick(slot, FILM_SLOTS[slot])


def route(start: int, end: int, pen: Pen) -> str:
    """From one lane to another, in words."""
    return f"{choose(pen, f'film spot {start}')} to {choose(pen, f'film spot {end}')}"


def _told(event: Event, film: Film, named: dict[int, Named], pen: Pen) -> str:
    item = film.scene.objects[event.place]
    if event.kind == "appear":
        words, named[event.place] = noun_phrase(item, pen)
        return f"{words} {choose(pen, 'film appear')} {pen.pick(f'lane {item.lane}')}"
    words = f"{named[event.place]} {choose(pen, f'film {event.kind}')}"
    return words if event.kind == "leave" else f"{words} from {route(item.lane, event.lane, pen)}"


@dataclass(frozen=True)
class StoryScore:
    """Right facts, and true or claimed ones, whichever are more."""

    right: int
    facts: int


def score_story(text: str, film: Film) -> StoryScore:
    """Compares a story with a film, part by part in the order of mention; any string is accepted.

    A fact is the kind of an object at the start, its colour and its lane (with the kind), an event (what happens to which
    colour and kind), and where it ends (with the event).
    """
    objects, events = read_story(text)
    start = film.frames[0].objects
    right = 0
    for mention, truth in zip(objects, start, strict=False):
        if mention.kind == truth.kind:
            right += 1 + (mention.colour == truth.colour) + (mention.lane == truth.lane)
    true = [(e.kind, name_of(film, e.place), _where(film, e)) for e in film.events]
    for claimed, event in zip(events, true, strict=False):
        right += (1 + (claimed[2] == event[2])) if claimed[:2] == event[:2] else 0
    return StoryScore(right, 3 * max(len(objects), len(start)) + 2 * max(len(events), len(true)))


def total_story(scores: Iterable[StoryScore]) -> float:
    """Right facts of several stories over all of theirs."""
    all_scores = list(scores)
    return sum(s.right for s in all_scores) / max(1, sum(s.facts for s in all_scores))


def name_of(film: Film, place: int) -> str:
    """Colour and kind of an object."""
    item = film.scene.objects[place]
    return f"{item.colour} {item.kind}"


def read_story(text: str) -> tuple[list[ParsedObject], list[tuple[str, str, str]]]:
    """The objects at the start that a story mentions, and its events as (kind, colour and kind of the object, where it
    ends: "0>2" for a move, "1" for what appears)."""
    _, _, body = text.lower().partition(":")
    objects: list[ParsedObject] = []
    events: list[tuple[str, str, str]] = []
    for clause in re.split(r"[.;,]", body):
        item = mention_of(clause)
        if item is None:
            continue
        kind = deed_of(clause)
        if kind is None:
            objects.append(item)
            continue
        where = route_of(clause) if kind == "move" else str(item.lane) if kind == "appear" else ""
        events.append((kind, f"{item.colour} {item.kind}", where or ""))
    return objects, events


def deed_of(clause: str) -> str | None:
    """The kind of event that a clause tells of; None for none, or for several."""
    kinds = {kind for kind, words in DEEDS.items() if any(re.search(rf"\b{w}\b", clause) for w in words)}
    return kinds.pop() if len(kinds) == 1 else None


def route_of(text: str) -> str | None:
    """ "0>2" for a text that names two lanes, from the back to the front."""
    spots = {name.split()[-1]: lane for lane, names in enumerate(SPOTS) for name in names}
    lanes = [spots[word] for word in re.findall(r"\w+", text) if word in spots]
    return f"{lanes[0]}>{lanes[1]}" if len(lanes) == 2 else None


def _where(film: Film, event: Event) -> str:
    lane = film.scene.objects[event.place].lane
    return {"move": f"{lane}>{event.lane}", "appear": str(lane), "leave": ""}[event.kind]
