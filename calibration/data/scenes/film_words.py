"""Every choice of wording that films add to those of scenes, by slot."""

from __future__ import annotations

SPOTS: tuple[tuple[str, ...], ...] = (
    ("the back", "the rear"),
    ("the middle", "the centre"),
    ("the front", "the edge"),
)
DEEDS: dict[str, tuple[str, ...]] = {
    "move": ("moves", "slides", "shifts", "glides"),
    "appear": ("turns up", "comes in", "shows up", "arrives"),
    "leave": ("leaves", "vanishes", "goes away", "is gone"),
}
CHANGES: dict[int, str] = {
    -3: "three fewer",
    -2: "two fewer",
    -1: "one fewer",
    0: "as many",
    1: "one more",
    2: "two more",
    3: "three more",
}

FILM_SLOTS: dict[str, tuple[str, ...]] = {
    "film row": ("left to right", "along the table", "in a row"),
    "film join": (",", ", and", ";"),
    "film begin": ("first ,", "to begin with ,", "soon"),
    "film next": ("then", "next ,", "after that ,"),
    "film stop": (".", ";"),
    "film end": ("{left} in the end .", "the last frame has {left} .", "at the end we count {left} ."),
    **{f"film {kind}": words for kind, words in DEEDS.items()},
    **{f"film spot {lane}": words for lane, words in enumerate(SPOTS)},
}

FILM_QUESTIONS: dict[str, tuple[str, ...]] = {
    "moved": ("what moved?", "which object has moved?", "what did not stay in its place?"),
    "appeared": ("what appeared?", "which object is new?", "what came in later?"),
    "left": ("what left?", "which object is gone?", "what is no longer there?"),
    "path": ("from where to where did the {kind} move?", "where did the {kind} go , and from where?"),
    "change": ("how did the number of objects change?", "are there more objects at the end , or fewer?"),
    "remain": (
        "how many of the first objects are there at the end?",
        "how many have been there all the time?",
    ),
    "first": ("what happened first?", "what was the first event?"),
    "last": ("what happened last?", "what was the last event?"),
}
FILM_REPLIES: dict[str, tuple[str, ...]] = {
    "film object": ("the {value}", "it is the {value}", "a {value}"),
    "film nothing": ("nothing", "nothing did"),
    "path": ("from {value}", "it goes from {value}", "{value}"),
    "change": ("{value}", "{value} at the end", "there are {value}"),
    "remain": ("{value}", "i count {value}", "{value} of them"),
    "event": ("the {value}", "i think the {value}"),
}
