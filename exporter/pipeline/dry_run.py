"""`vlmexport build --dry-run`: what a build would write and need, from shapes alone.

Graphs are traced as in a real build (their nodes refer to weights by offset), so counts and bytes are exact: every graph
that is traced is a row of the report. No weight is loaded, nothing is written, and of a hub model only headers are
fetched (a head beside a tied embedding table, whose numbers would have to be compared, is taken for the same table). Memory is an estimate: see `estimate_memory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import onnx_ir as ir
from pydantic import BaseModel

from ...runtime.measure.inspection import (
    cross_kv_bytes_per_row,
    kv_bytes_per_image,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
)
from ..common.memory import (
    PROCESS_BYTES,
    GraphMemory,
    fits_whole,
    graph_memory,
    streamed_parity_bytes,
    whole_parity_bytes,
)
from ..families.common.parts import GraphSpec
from ..parity.recorded import RowCount, compared_rows, recorded_memory, row_counts
from .describe import count, external_weights
from .duration import BuildWork, build_seconds, measured_rates
from .export import Exported, export
from .prepare import prepare
from .prepared import Prepared
from .request import BuildRequest

RUNTIME_BYTES = 110 << 20
"""Resident memory of the runtime before any weight: Python, numpy, ONNX Runtime (measured on Linux)."""


class DryRunGraph(BaseModel):
    """One graph. `parameters` and `weight_bytes` count the weights it refers to; a shared one counts in each graph."""

    name: str
    role: str
    layers: list[int] | None
    nodes: int
    parameters: int
    weight_bytes: int
    bytes: int


class DryRunMemory(BaseModel):
    """Estimated peak resident memory in bytes. `weights` and `cache` are parts of `run`, on a CPU: in float32. `run` is
    of a session that decodes one sequence at a time; every further one takes `cache` once more."""

    build: int
    run: int
    weights: int
    cache: int


class DryRun(BaseModel):
    """What a build would do. Bytes unless named otherwise; `bundle_bytes` leaves out the tokenizer, `linked_bytes` of
    it are files of the checkpoint. `seconds` is an estimate of computing on this machine (`exporter/pipeline/duration.py`),
    without a slow disk's time and plans."""

    status: Literal["dry-run"] = "dry-run"
    model: str
    family: str
    architecture: str
    num_layers: int
    cuts: list[int]
    drafts: list[str]
    draft_precisions: dict[str, str]
    speculative: bool
    precision: str
    graphs: list[DryRunGraph]
    parameters: int
    draft_parameters: int
    weight_bytes: int
    linked_bytes: int
    bundle_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_image: int
    kv_bytes_per_sequence: int
    kv_bytes: int
    cross_kv_bytes_per_row: int
    parity: Literal["whole", "layer by layer"]
    peak_memory: DryRunMemory
    seconds: float
    notices: list[str]


def dry_run(request: BuildRequest, progress: Callable[[str, int, int], None] | None = None) -> DryRun:
    """Checks a request and says what its build would write; raises the errors that the build would."""
    prepared = prepare(request, write=False)
    begin = time.monotonic()
    exported = export(prepared, progress)
    tracing = time.monotonic() - begin
    graphs = [_graph(spec) for spec in exported.graphs]
    shape = prepared.family.decoder
    manifest, weight_bytes = prepared.manifest, exported.store.bytes
    linked = sum(manifest.weights.linked.values())
    sequence, cross = kv_bytes_per_sequence(manifest), cross_kv_bytes_per_row(manifest)
    held = replace(manifest, cache_dtype="float32")  # a CPU's
    cache = kv_bytes_per_sequence(held) + cross_kv_bytes_per_row(held) * (held.limits.max_source or 0)
    memory, whole, counts = estimate_memory(prepared, exported, cache)
    work = BuildWork(
        prepared.checkpoint.tensors.memory.stored,
        weight_bytes,
        linked,
        exported.store.parameters,
        # Tokens of a text encoder pass as many layers; image embeddings that cross-attention reads pass none.
        sum(count.decoded + (count.source if count.encoded else 0) for count in counts),
        tracing,
    )
    return DryRun(
        model=request.model,
        family=prepared.family.name,
        architecture=prepared.checkpoint.architecture,
        num_layers=shape.num_layers,
        cuts=prepared.cuts,
        drafts=[d.name for d in prepared.selection.drafts],
        draft_precisions=prepared.selection.precisions,
        speculative=prepared.selection.speculative,
        precision=manifest.weights_dtype,
        graphs=graphs,
        parameters=exported.parameters,
        draft_parameters=exported.draft_parameters,
        weight_bytes=weight_bytes,
        linked_bytes=linked,
        bundle_bytes=weight_bytes + linked + sum(g.bytes for g in graphs),
        kv_bytes_per_token=kv_bytes_per_token(manifest),
        kv_bytes_per_image=kv_bytes_per_image(manifest),
        kv_bytes_per_sequence=sequence,
        kv_bytes=request.max_batch * sequence,
        cross_kv_bytes_per_row=cross,
        parity="whole" if whole else "layer by layer",
        peak_memory=memory,
        seconds=round(build_seconds(work, measured_rates(), parity=request.parity), 3),
        notices=prepared.notices,
    )


def estimate_memory(
    prepared: Prepared, exported: Exported, cache_bytes: int
) -> tuple[DryRunMemory, bool, list[RowCount]]:
    """Peak resident memory, whether parity runs whole, and the tokens that it then compares.

    Build: the process, plus the larger of writing (the largest stored tensor and a part of it as read) and parity
    (`exporter/common/memory.py`). Run: the runtime, weights, key/value arena and cross-attention cache.
    """
    request, memory = prepared.request, prepared.checkpoint.tensors.memory
    stored, weights = prepared.manifest.weights.total, exported.store.loaded_bytes
    largest = max((slot.bytes for slot in exported.store.slots().values()), default=0)
    writing = max(largest + memory.largest, 2 * memory.largest)
    graphs = [_memory(spec) for spec in exported.graphs]
    length = compared_rows(request.length)
    counts = row_counts(prepared.family, length, streamed=False)
    parity = whole_parity_bytes(graphs, memory, recorded_memory(prepared.family, counts))
    whole = fits_whole(parity, request.parity_memory, stored)
    if not whole:
        counts = row_counts(prepared.family, length, streamed=True)
        parity = streamed_parity_bytes(graphs, memory, recorded_memory(prepared.family, counts))
    peak = DryRunMemory(
        build=PROCESS_BYTES + max(writing, parity if request.parity else 0),
        run=RUNTIME_BYTES + weights + cache_bytes,
        weights=weights,
        cache=cache_bytes,
    )
    return peak, whole, counts


def _memory(spec: GraphSpec) -> GraphMemory:
    """In parity, which computes with the floats that integers stand for."""
    weights = {weight.name or "": 4 * weight.size for weight in external_weights(spec.model)}
    nodes = ((n.name or "", [v.name or "" for v in n.inputs if v is not None]) for n in spec.model.graph)
    return graph_memory(nodes, weights)


def _graph(spec: GraphSpec) -> DryRunGraph:
    external = external_weights(spec.model)
    return DryRunGraph(
        name=spec.name,
        role=spec.role,
        layers=list(spec.layers) if spec.layers else None,
        nodes=len(spec.model.graph),
        parameters=count(external),
        weight_bytes=sum(t.nbytes for t in external),
        bytes=sum(len(ir.to_proto(model).SerializeToString()) for model in spec.files.values()),
    )
