"""What `fit` knows of published models without their files: the sizes of their graphs (`benchmarks/published_shapes.py`).

Nothing here needs PyTorch or the hub.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...runtime.bundle.manifest import GraphInfo, Manifest
from ...runtime.bundle.target_weights import TargetWeights
from ...runtime.common.errors import OptionError
from .lengths import check_length

ITEM = 4
"""Bytes of a number in the manifests, which are those of float32."""

BLOCK = 32
"""Integers that share a scale."""

FILE = Path(__file__).parents[1] / "published_shapes.json"
"""Alias → what is known. One file, because models are alike: it takes a third of the room in the wheel."""


def read_documents() -> dict[str, Any]:
    """What `FILE` holds."""
    return json.loads(FILE.read_text("utf-8"))


@dataclass(frozen=True)
class Shapes:
    """`manifest` is what a build without options would write, of weights that nobody read. `max_positions`: the longest
    sequence (tokens) that the model was made for, None: any; `needed_embeds`: what a picture takes of it; `integers`: the
    numbers of each graph that `--weights` can make integers."""

    manifest: Manifest
    max_positions: int | None
    needed_embeds: int
    integers: Mapping[str, int]

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding table, too, which no graph counts."""
        manifest = self.manifest
        counted = sum(graph.parameters or 0 for graph in manifest.graphs.values())
        table = manifest.text.vocab_size * manifest.decoder.hidden_size
        return manifest.weights.total // ITEM - counted < table // 2


def published(alias: str) -> Shapes | None:
    """Of the alias of a published model; None for any other name."""
    document = read_documents().get(alias)
    if document is None:
        return None
    # Not `from_dict`: without their inputs and outputs, graphs do not fit the rest of a manifest.
    return Shapes(
        Manifest.parse(document["manifest"], ""),
        document["max_positions"],
        document["needed_rows"],
        document["integers"],
    )


def with_integers(shapes: Shapes, layers: str | None, head: str | None, choice: str) -> Shapes:
    """The model with matrices of its layers, and of its LM head, of the types int8 or int4, None: float; `choice` is the
    value of `--weights`."""
    kinds = {graph: head if graph == "head" else layers for graph in shapes.integers}
    graphs, saved = dict(shapes.manifest.graphs), 0
    for name, kind in kinds.items():
        if kind is None:
            continue
        count = shapes.integers[name]
        size = -(-count // 2) if kind == "int4" else count
        graphs[name] = replace(graphs[name], integers=count, integer_bytes=size)
        saved += ITEM * count - size - ITEM * (count // BLOCK)
    dtype = layers or head
    target = None if dtype is None else TargetWeights(dtype=dtype, block=BLOCK, head=head, choice=choice)
    manifest = shapes.manifest
    weights = replace(manifest.weights, bytes=manifest.weights.bytes - saved)
    return replace(shapes, manifest=replace(manifest, graphs=graphs, weights=weights, target_weights=target))


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
    cuts = [0, layer, layers]
    graphs = {name: graph for name, graph in manifest.graphs.items() if name not in manifest.segments}
    graphs |= _segments(segments, cuts)
    drafts = [
        draft if draft.layer is None else replace(draft, layer=layer, name=f"{draft.kind}@{layer}")
        for draft in manifest.drafts
    ]
    return replace(manifest, decoder=replace(manifest.decoder, cuts=cuts), graphs=graphs, drafts=drafts)


def _segments(old: Sequence[GraphInfo], cuts: Sequence[int]) -> dict[str, GraphInfo]:
    def share(counts: Sequence[int | None], layers: int) -> int:
        return sum(count or 0 for count in counts) // cuts[-1] * layers

    return {
        f"segment.{i}": replace(
            old[0],
            file=f"segment.{i}.onnx",
            layers=(first, last),
            parameters=share([graph.parameters for graph in old], last - first),
            integers=share([graph.integers for graph in old], last - first) or None,
            integer_bytes=share([graph.integer_bytes for graph in old], last - first) or None,
        )
        for i, (first, last) in enumerate(itertools.pairwise(cuts))
    }
