"""The closed world of the tabletop scenes: what can be on the table and how it looks."""

from __future__ import annotations

KINDS: tuple[str, ...] = ("ball", "cube", "cylinder", "cone", "mug", "star", "ring", "plate")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 30, 34),
    "orange": (250, 134, 16),
    "yellow": (248, 222, 40),
    "green": (36, 156, 56),
    "cyan": (64, 214, 222),
    "blue": (32, 70, 216),
    "purple": (128, 40, 168),
    "pink": (252, 140, 196),
}
SIZES: tuple[str, ...] = ("small", "large")
PATTERNS: tuple[str, ...] = ("plain", "striped")
TABLES: tuple[str, ...] = ("wooden", "white", "grey", "black", "tiled", "checked")
WALLS: dict[str, tuple[int, int, int]] = {
    "cream": (236, 222, 184),
    "grey": (150, 154, 160),
    "blue": (96, 128, 176),
}
LIGHTS: tuple[str, ...] = ("left", "right")
LANES: tuple[str, ...] = ("back", "middle", "front")
GAPS: tuple[str, ...] = ("near", "far")

UNSEEN: frozenset[tuple[str, str]] = frozenset(
    {
        ("red", "mug"),
        ("orange", "cone"),
        ("green", "star"),
        ("cyan", "cube"),
        ("blue", "ball"),
        ("pink", "ring"),
    }
)
"""(colour, kind) pairs that occur in the held-out split only."""
