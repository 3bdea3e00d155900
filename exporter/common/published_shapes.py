"""What `fit` knows of published models without their files: the sizes of their graphs (`benchmarks/published_shapes.py`).

Nothing here needs PyTorch or the hub.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...runtime.bundle.manifest import GraphInfo, Manifest
from ...runtime.common.errors import OptionError
from .lengths import check_length

FOLDER = Path(__file__).parents[1] / "published_shapes"


@dataclass(frozen=True)
class Shapes:
    """`manifest` is what a build without options would write, of weights that nobody read. `max_positions`: the longest
    sequence (tokens) that the model was made for, None: any; `needed_embeds`: what a picture takes of it."""

    manifest: Manifest
    max_positions: int | None
    needed_embeds: int


def published(alias: str) -> Shapes | None:
    """Of the alias of a published model; None for any other name."""
    if alias not in {path.stem for path in FOLDER.glob("*.json")}:
        return None
    document = json.loads((FOLDER / f"{alias}.json").read_text("utf-8"))
    # Not `from_dict`: without their inputs and outputs, graphs do not fit the rest of a manifest.
    return Shapes(
        Manifest.parse(document["manifest"], ""), document["max_positions"], document["needed_rows"]
    )


def planned(shapes: Shapes, draft_layer: int | None, max_length: int | None, batch: int) -> Manifest:
    """The manifest of a build with these options. Raises OptionError for what a build would refuse."""
    manifest = shapes.manifest
    limits = manifest.limits
    if max_length is not None:
        check_length(max_length, shapes.max_positions, shapes.needed_embeds)
        manifest = replace(manifest, limits=replace(limits, max_length=max_length))
    if batch > limits.max_batch:
        manifest = replace(manifest, limits=replace(manifest.limits, max_batch=batch))
    if draft_layer is None:
        return manifest
    layers = manifest.decoder.num_layers
    if not 1 <= draft_layer < layers:
        raise OptionError(
            f"--draft-layer {draft_layer} is out of range: this decoder has {layers} layers, choose 1..{layers - 1}"
        )
    return cut(manifest, draft_layer)


def cut(manifest: Manifest, layer: int) -> Manifest:
    """The decoder cut after `layer`, and drafts that branch off there. All layers of a decoder have as many numbers."""
    layers = manifest.decoder.num_layers
    segments = [manifest.graphs[name] for name in manifest.segments]
    numbers = sum(graph.parameters or 0 for graph in segments)
    cuts = [0, layer, layers]
    graphs = {name: graph for name, graph in manifest.graphs.items() if name not in manifest.segments}
    graphs |= _segments(segments[0], cuts, numbers // layers)
    drafts = [
        draft if draft.layer is None else replace(draft, layer=layer, name=f"{draft.kind}@{layer}")
        for draft in manifest.drafts
    ]
    return replace(manifest, decoder=replace(manifest.decoder, cuts=cuts), graphs=graphs, drafts=drafts)


def _segments(like: GraphInfo, cuts: Sequence[int], numbers: int) -> dict[str, GraphInfo]:
    return {
        f"segment.{i}": replace(
            like, file=f"segment.{i}.onnx", layers=(first, last), parameters=numbers * (last - first)
        )
        for i, (first, last) in enumerate(itertools.pairwise(cuts))
    }
