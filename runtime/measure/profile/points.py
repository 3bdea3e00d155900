"""What is timed: every graph of a bundle at the sizes that decoding gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ...bundle.folder import Bundle
from ...bundle.manifest import Manifest
from ...families import get_family
from ...graphs.registry import graph_role
from ...graphs.role import PREFILL as CHUNK
from ...graphs.role import REQUEST, TOKEN, VERIFY
from ...images.synthetic import synthetic_image
from ..synthetic_inputs import pass_sizes

PREFILL = 128
"""Rows of the chunk of a prompt that is timed, as plans are tuned for it."""

SIDE = 448
"""Pixels of the square picture that is timed where a model takes any size."""


QUESTION = 16
"""Tokens of a question to an encoder, beside a picture."""


@dataclass(frozen=True)
class Point:
    """One graph at one size. `profile` is the plan's: `prefill`, `token`, `verify`, or `request` for a graph that runs
    once for a picture or a source, whose positions `width` then counts.

    `sizes`: the graph's symbolic dimensions. `given`: inputs that must be real (how a picture is cut into windows, say).
    """

    graph: str
    profile: str
    width: int
    sizes: Mapping[str, int] = field(compare=False)
    given: Mapping[str, np.ndarray] = field(compare=False, default_factory=dict)

    @property
    def name(self) -> str:
        """Of its files: `segment.0.verify.6`."""
        return f"{self.graph}.{self.profile}.{self.width}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """(graph, profile, width) of a `Point.name`, None for anything else."""
    graph, _, rest = name.rpartition(".")
    graph, _, profile = graph.rpartition(".")
    return (graph, profile, int(rest)) if graph and rest.isascii() and rest.isdigit() else None


def verify_widths(bundle: Bundle) -> list[int]:
    """Widths that are timed unasked: those of `bench`, and the one that the bundle's own draft length needs."""
    from ..benchmark import WIDTHS

    manifest = bundle.manifest
    own = manifest.policy.draft_length + 1
    return sorted({width for width in (*WIDTHS, own) if width <= manifest.limits.max_width})


def source_len(manifest: Manifest) -> int:
    """Positions that cross-attention sees: those of a picture, with a short question where a text encoder reads it."""
    most = manifest.limits.max_source or 1
    return most if manifest.encoder is None else min((manifest.text.image_rows or 0) + QUESTION, most)


def list_points(bundle: Bundle, widths: Iterable[int]) -> list[Point]:
    """Every graph once per request (a picture, the source of an encoder), at a chunk of a prompt, at one token and at
    `widths`. One sequence, whose cache is full: a plan's has a fixed size, and its pass costs the same at any
    filling."""
    manifest = bundle.manifest
    limits = manifest.limits
    chunk, source = min(PREFILL, limits.max_length), source_len(manifest)
    cache = limits.max_length + limits.max_width
    fixed = {"batch": 1, "cache": cache, "distances": cache + 1, "source": source}
    if manifest.decoder.max_positions is not None:
        fixed["max_positions"] = manifest.decoder.max_positions
    wide = sorted(width for width in set(widths) if width > 1)
    points: list[Point] = []
    for name, graph in manifest.graphs.items():
        role = graph_role(graph.role)
        phases = role.timed_phases(graph)
        if REQUEST in phases and role.reads_picture:
            run, num_embeds = _picture(bundle)
            given = run if role.interface is None else {}
            points.append(Point(name, REQUEST, num_embeds, {**fixed, "image_rows": num_embeds}, given))
        elif REQUEST in phases:
            points.append(Point(name, REQUEST, source, fixed))
        if CHUNK in phases:  # a prompt's last position alone gets logits
            points.append(_at(name, CHUNK, chunk, fixed, num_logits=1))
        if TOKEN in phases:
            points.append(_at(name, TOKEN, 1, fixed))
        if VERIFY in phases:
            points += [_at(name, VERIFY, width, fixed) for width in wide]
    return points


def _at(
    graph: str, profile: str, width: int, fixed: Mapping[str, int], num_logits: int | None = None
) -> Point:
    return Point(graph, profile, width, {**fixed, **pass_sizes(width, num_logits)})


def _picture(bundle: Bundle) -> tuple[Mapping[str, np.ndarray], int]:
    """Inputs of one run of the vision graph, and the number of embeddings of its picture."""
    manifest = bundle.manifest
    assert manifest.image is not None
    picture = synthetic_image(manifest.image.height or SIDE, manifest.image.width or SIDE)
    view = get_family(manifest.model.family).view(bundle, picture)
    return view.runs[0], view.num_embeds
