"""Every graph of a bundle, in memory; the manifest learns what they look like. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...runtime.bundle.checks import check_description
from ...runtime.bundle.interfaces import interface
from ...runtime.bundle.manifest import WeightsInfo
from ...runtime.graphs.on_device import CHANGING
from ...runtime.graphs.registry import graph_role
from ...runtime.graphs.role import Values
from ...runtime.graphs.values import vocabulary
from ..families.common.parts import GraphSpec
from ..graphs.commit import build_commit
from ..graphs.gqa_fold import folded_form
from ..graphs.logits_processors import build_changes
from ..graphs.mask import build_mask
from ..graphs.precision import Precision, source_form, wide_form
from ..graphs.weights import WEIGHTS_FILE, WeightStore
from .describe import describe_graph, describe_tensors
from .prepared import Prepared
from .request import Progress


@dataclass
class Exported:
    """All graphs of a bundle (they hold references, not weights) and the layout of the weights file."""

    graphs: list[GraphSpec]
    store: WeightStore
    parameters: int
    draft_parameters: int


def export(prepared: Prepared, progress: Progress | None = None) -> Exported:
    """Traces every graph and completes the manifest's `tensors`, `graphs`, `weights` and `model.parameters`.

    What the runtime would refuse is refused here, before weights are written: BundleError names the field.
    """
    family, manifest = prepared.family, prepared.manifest
    tensors = prepared.checkpoint.tensors
    store = WeightStore([tensors], manifest, linked=tensors if prepared.request.link_weights else None)
    manifest.tensors = describe_tensors(store, family.tensors())
    precision = family.precision(prepared.request.precision)
    graphs: list[GraphSpec] = []
    total = graph_count(prepared)
    if progress:
        progress("graphs", 0, total)

    def add(spec: GraphSpec) -> None:
        spec = _in_precision(spec, precision, prepared) if precision.narrow else spec
        # A CPU computes a quantized target in the folded form, for the same bits at every width.
        wide = None if spec.wide is None or manifest.target_weights is None else folded_form(spec.wide)
        graphs.append(replace(spec, folded=folded_form(spec.model), wide_folded=wide))
        if progress:
            progress("graphs", len(graphs), total)

    for spec in family.graphs(prepared.cuts, store):
        add(spec)
    parameters = store.parameters
    for draft in prepared.selection.drafts:
        for spec in draft.graphs(store, family):
            add(spec)
        manifest.tensors |= describe_tensors(store, draft.tensors(family))
    layers = range(family.decoder.num_layers)
    add(GraphSpec("commit", "commit", build_commit(store, layers, family.decoder)))
    add(GraphSpec("mask", "mask", build_mask(store, manifest.decoder)))
    words = vocabulary(manifest)
    for name in CHANGING:
        changes = build_changes(store, manifest.limits, words, repeats=name == "repeats")
        add(GraphSpec(name, name, changes))
    manifest.graphs = {spec.name: describe_graph(spec) for spec in graphs}
    manifest.weights = WeightsInfo(
        file=WEIGHTS_FILE,
        bytes=store.bytes,
        linked={name: tensors.file_bytes(file) for name, file in store.shards.items()},
    )
    manifest.model.parameters = parameters
    check_description(manifest)
    return Exported(graphs, store, parameters, store.parameters - parameters)


def graph_count(prepared: Prepared) -> int:
    """How many graphs `export` makes, before any is traced."""
    family, manifest = prepared.family, prepared.manifest
    single = ("embed", "head", "commit", "mask", *CHANGING)
    towers = (family.vision is not None, manifest.encoder is not None, manifest.decoder.cross_attention)
    drafts = sum(len(draft.graph_names()) for draft in prepared.selection.drafts)
    return len(single) + sum(towers) + len(prepared.cuts) - 1 + drafts


def _in_precision(spec: GraphSpec, precision: Precision, prepared: Prepared) -> GraphSpec:
    """A composed graph in the forms that a bundle of float16 or bfloat16 holds."""
    inputs: Values = {}
    outputs: Values = {"image_rows": (precision.compute, ())} if spec.role == "vision" else {}
    if graph_role(spec.role).interface is not None:
        inputs, outputs = interface(prepared.manifest, spec.role, spec.layers, spec.name)
    wide_residual = prepared.family.language.wide_residual and precision.weights == "float16"
    source = source_form(spec.model, precision, inputs, outputs, wide_residual=wide_residual)
    return replace(spec, model=source, wide=wide_form(spec.model, precision))
