"""How many of a scene's facts a caption gets right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .scene import Relation, Scene

HEADLINE = ("object", "colour", "relation")


@dataclass(frozen=True)
class ParsedObject:
    """One mention: what a sentence says about one object and its place beside the one before."""

    kind: str
    colour: str | None
    size: str | None
    pattern: str
    relation: Relation | None
    lane: int | None


@dataclass(frozen=True)
class ParsedCaption:
    """Everything a caption claims."""

    objects: tuple[ParsedObject, ...]
    count: int | None
    table: str | None
    wall: str | None
    light: str | None


@dataclass
class CaptionScore:
    """Right, true and claimed facts by type; types are those of `score_parsed`."""

    right: dict[str, int] = field(default_factory=dict)
    true: dict[str, int] = field(default_factory=dict)
    claimed: dict[str, int] = field(default_factory=dict)

    def accuracy(self, *types: str) -> float:
        """Right facts over true or claimed facts, whichever are more; default: the headline types.

        Invented objects therefore cost as much as missed ones.
        """
        chosen = types or HEADLINE
        facts = sum(max(self.true[t], self.claimed[t]) for t in chosen)
        return sum(self.right[t] for t in chosen) / facts if facts else 0.0


def score_parsed(parsed: ParsedCaption, scene: Scene) -> CaptionScore:
    """Counts facts of a caption; its i-th mention is about the i-th object from the left, whatever it says, so that luck
    finds no better partner.

    Types: ``object`` (the kind), ``colour``, ``size`` and ``pattern`` (each only right together
    with the kind), ``relation`` (gap and depth against the left neighbour, both kinds right),
    ``setting`` (count, table, wall, light), ``unseen`` (kind and colour of objects whose pair was
    never trained; claims are not counted there).
    """
    n, claimed = len(scene.objects), len(parsed.objects)
    result = CaptionScore(
        right=dict.fromkeys(("object", "colour", "size", "pattern", "relation", "setting", "unseen"), 0),
        true=dict.fromkeys(("object", "colour", "size", "pattern"), n)
        | {"relation": n - 1, "setting": 4, "unseen": len(scene.unseen)},
        claimed=dict.fromkeys(("object", "colour", "size", "pattern"), claimed)
        | {"relation": max(0, claimed - 1), "setting": 4, "unseen": 0},
    )
    right = result.right
    for i, truth in enumerate(scene.objects):
        if i >= claimed or (mention := parsed.objects[i]).kind != truth.kind:
            continue
        right["object"] += 1
        right["colour"] += mention.colour == truth.colour
        right["size"] += mention.size == truth.size
        right["pattern"] += mention.pattern == truth.pattern
        right["unseen"] += i in scene.unseen and mention.colour == truth.colour
        if i and parsed.objects[i - 1].kind == scene.objects[i - 1].kind:
            right["relation"] += mention.relation == scene.relations[i - 1]
    right["setting"] += (parsed.count == n) + (parsed.table == scene.table)
    right["setting"] += (parsed.wall == scene.wall) + (parsed.light == scene.light)
    return result


def total_accuracy(scores: Iterable[CaptionScore], *types: str) -> float:
    """`CaptionScore.accuracy` over the summed counts of captions whose excess claims do not cancel."""
    chosen = types or HEADLINE
    right = facts = 0
    for item in scores:
        right += sum(item.right[t] for t in chosen)
        facts += sum(max(item.true[t], item.claimed[t]) for t in chosen)
    return right / facts if facts else 0.0
