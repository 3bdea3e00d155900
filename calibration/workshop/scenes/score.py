"""How many of a scene's facts a caption gets right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .parse import ParsedCaption, ParsedObject, parse_caption
from .scene import Scene, SceneObject

HEADLINE = ("object", "colour", "relation")


@dataclass
class CaptionScore:
    """Right, true and claimed facts by type; types are those of `score`."""

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


def score(text: str, scene: Scene) -> CaptionScore:
    """`score_parsed` of a caption of the first form."""
    return score_parsed(parse_caption(text), scene)


def score_parsed(parsed: ParsedCaption, scene: Scene, strict: bool = False) -> CaptionScore:
    """Counts facts of a caption, after aligning its mentions with the objects from left to right.

    `strict`: the i-th mention is about the i-th object, whatever it says; luck then finds no better partner.

    Types: ``object`` (the kind), ``colour``, ``size`` and ``pattern`` (each only right together
    with the kind), ``relation`` (gap and depth against the left neighbour, both kinds right),
    ``setting`` (count, table, wall, light), ``unseen`` (kind and colour of objects whose pair was
    never trained; claims are not counted there).
    """
    if strict:
        pairs = [(i, i) for i in range(min(len(parsed.objects), len(scene.objects)))]
    else:
        pairs = _align(parsed.objects, scene.objects)
    mention_of = {truth: mention for mention, truth in pairs}
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
        if i not in mention_of:
            continue
        mention = parsed.objects[mention_of[i]]
        if mention.kind != truth.kind:
            continue
        right["object"] += 1
        right["colour"] += mention.colour == truth.colour
        right["size"] += mention.size == truth.size
        right["pattern"] += mention.pattern == truth.pattern
        right["unseen"] += i in scene.unseen and mention.colour == truth.colour
        before = mention_of.get(i - 1)
        if (
            before is not None
            and before == mention_of[i] - 1
            and parsed.objects[before].kind == scene.objects[i - 1].kind
        ):
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


def _align(mentions: tuple[ParsedObject, ...], objects: tuple[SceneObject, ...]) -> list[tuple[int, int]]:
    """Order-keeping pairs (mention, object) with the most agreement."""
    best: list[list[tuple[float, list[tuple[int, int]]]]] = [
        [(0.0, []) for _ in range(len(objects) + 1)] for _ in range(len(mentions) + 1)
    ]
    for m, mention in enumerate(mentions, 1):
        for o, item in enumerate(objects, 1):
            agreement = 2 * (mention.kind == item.kind) + (mention.colour == item.colour) + 0.1
            agreement += 0.1 * ((mention.size == item.size) + (mention.pattern == item.pattern))
            value, pairs = best[m - 1][o - 1]
            together = (value + agreement, [*pairs, (m - 1, o - 1)])
            best[m][o] = max(together, best[m - 1][o], best[m][o - 1], key=lambda v: v[0])
    return best[-1][-1][1]
