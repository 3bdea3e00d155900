"""Every choice that an author has, by slot. No content word stands in two slots that mean different things."""

from __future__ import annotations

SIZES: dict[str, tuple[str, ...]] = {
    "small": ("small", "little", "tiny", "compact"),
    "large": ("large", "big", "huge", "bulky"),
}
KINDS: dict[str, tuple[str, ...]] = {
    "ball": ("ball", "sphere", "orb"),
    "cube": ("cube", "block", "box"),
    "cylinder": ("cylinder", "can", "drum"),
    "cone": ("cone", "funnel"),
    "mug": ("mug", "cup", "beaker"),
    "star": ("star", "asterisk"),
    "ring": ("ring", "hoop", "loop"),
    "plate": ("plate", "dish", "saucer"),
}
# A word before the colour ends in "-", one after the kind does not; plain objects may have none.
PATTERNS: dict[str, tuple[str, ...]] = {
    "plain": ("", "plain-", "smooth-", "simple-"),
    "striped": ("striped-", "banded-", "with stripes", "with bands", "with lines"),
}
TABLES: dict[str, tuple[str, ...]] = {
    "wooden": ("wooden", "timber"),
    "white": ("white", "snowy"),
    "grey": ("grey", "concrete"),
    "black": ("black", "ebony"),
    "tiled": ("tiled", "mosaic"),
    "checked": ("checked", "gridded"),
}
WALLS: dict[str, tuple[str, ...]] = {
    "cream": ("cream", "ivory"),
    "grey": ("slate", "ashen"),
    "blue": ("azure", "denim"),
}
LANES: tuple[tuple[str, ...], ...] = (
    ("at the back", "at the rear"),
    ("in the middle", "halfway in"),
    ("at the front", "by the edge"),
)
GAPS: dict[str, tuple[str, ...]] = {
    "near": ("just", "close", "directly", "immediately"),
    "far": ("further along and", "a gap away and", "at a distance and", "set apart and"),
}
DEPTHS: dict[str, tuple[str, ...]] = {
    "behind": ("behind it", "beyond it"),
    "level": ("beside it", "alongside it"),
    "front": ("before it", "this side of it"),
}
ORDERS: dict[str, tuple[str, ...]] = {
    "forward": ("in reading order", "listed forward", "taken in turn"),
    "backward": ("in reverse order", "listed backward", "taken from the end"),
}
KIND_REASONS: dict[str, str] = {
    "ball": "it may roll off",
    "cube": "it stacks well",
    "cylinder": "it could topple",
    "cone": "its tip is fragile",
    "mug": "it could spill",
    "star": "its points are sharp",
    "ring": "it has a hole to hold",
    "plate": "it breaks easily",
}
REASONS: dict[str, tuple[str, ...]] = {
    "way": ("nothing is in its way", "its path is free"),
    "opens": ("it opens the list", "it was named earliest"),
    "closes": ("it closes the list", "it was named latest"),
    "only patterned": ("only it has a pattern", "its pattern is unique"),
    "only unpatterned": ("only it has no pattern", "its bare surface is unique"),
    "room": ("it has room around", "it is easy to reach"),
    "crowd": ("it crowds its neighbour", "it is squeezed in"),
    "warm": ("its colour is warm", "it has a warm tone"),
    "cool": ("its colour is cool", "it has a cool tone"),
}
RULES = ("way", "opens", "closes", "only size", "only pattern", "room", "crowd", "warmth", "kind")
ACTS = ("lift", "move", "take", "pull")
ARMS = ("the arm should first", "a robot would first", "first the gripper must", "to clear up , first")
BECAUSE = ("because", "since", "as")
THEN = (", then", ", after that", ", afterwards")
PLACES = ("aside", "into the bin", "onto the tray", "to the shelf")
NUMBERS: dict[int, str] = {0: "none", 1: "one", 2: "two", 3: "three", 4: "four", 5: "five"}

SLOTS: dict[str, tuple[str, ...]] = {
    "opening": (
        "a {table} table with {count} {things} , {wall} wall , {light}",
        "{count} {things} on a {table} table , {light} , {wall} wall",
        "{light} , a {table} table and a {wall} wall , {count} {things}",
        "we see {count} {things} ; the table is {table} , the wall {wall} , {light}",
    ),
    "things": ("objects", "things", "items", "pieces"),
    "light": ("lit from the {side}", "light at {side}", "a lamp on the {side}", "brightest at {side}"),
    "remark": ("", ", all in view", ", indoors"),
    "order": ("forward", "backward"),
    "phrase": (
        "a {size} {before}{colour} {kind}{after}",
        "a {before}{colour} {kind}{after} of {size} size",
        "a single {size} {before}{colour} {kind}{after}",
        "a {before}{kind}{after} that is {size} and {colour}",
    ),
    "verb": ("stands", "sits", "rests", "waits", "lies", "appears", "we find"),
    "sequence": ("place first", "object first"),
    "hedge": ("", "perhaps", "clearly", "apparently"),
    "lane too": ("no", "yes"),
    "join": (".", ", and", "; next"),
    "arm": ARMS,
    "act": ACTS,
    "rule": RULES,
    "because": BECAUSE,
    "then": THEN,
    "destination": PLACES,
    "end": (".", ", which leaves {left} .", ". {left} may stay ."),
    **{f"size {name}": words for name, words in SIZES.items()},
    **{f"kind {name}": words for name, words in KINDS.items()},
    **{f"pattern {name}": words for name, words in PATTERNS.items()},
    **{f"table {name}": words for name, words in TABLES.items()},
    **{f"wall {name}": words for name, words in WALLS.items()},
    **{f"lane {lane}": words for lane, words in enumerate(LANES)},
    **{f"gap {name}": words for name, words in GAPS.items()},
    **{f"depth {name}": words for name, words in DEPTHS.items()},
    **{f"order {name}": words for name, words in ORDERS.items()},
    **{f"reason {name}": words for name, words in REASONS.items()},
}


def meanings(table: dict[str, tuple[str, ...]]) -> dict[str, str]:
    """Word to what it means, for a table of single words; the "-" of patterns is taken off."""
    return {word.rstrip("-").split()[-1]: name for name, words in table.items() for word in words if word}
