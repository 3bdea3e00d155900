"""`vlmexport build`: a model and its drafts become a bundle."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...runtime.bundle.manifest import SCHEMA_VERSION
from ...runtime.errors import ExportError, OptionError
from ...runtime.families import FAMILIES as RUNTIME_FAMILIES
from ..checkpoint import Checkpoint, fingerprint, open_checkpoint
from ..drafts.selection import DraftSelection, select_drafts
from ..families.base import Family, GraphSpec
from ..families.registry import family_for
from ..graphs.commit import build_commit
from ..graphs.weights import WEIGHTS_FILE, WeightStore
from .generation import describe_generation, generation_notices
from .text import describe_text, write_tokenizer
from .write import (
    MANIFEST,
    Progress,
    check_description,
    check_output,
    check_space,
    describe_files,
    describe_graph,
    describe_tensors,
    replaced_folder,
    write_graphs,
    write_manifest,
)

if TYPE_CHECKING:
    from ..tensorrt import PlanOptions

PRECISIONS = ("float32",)


class BuildRequest(BaseModel):
    """What to build. Lengths are in tokens; `parity_memory` is in bytes."""

    model_config = ConfigDict(extra="forbid")

    model: str
    output: Path
    draft_layer: int | None = None
    drafts: list[str] = Field(default_factory=list)
    max_length: int = 512
    max_batch: int = 1
    max_width: int = 16
    max_source: int = 512
    precision: str = "float32"
    default_prompt: str | None = None
    force: bool = False
    parity: bool = True
    parity_memory: int = 4 << 30
    backend: str | None = None
    target: str = "sm86"
    plan_precision: str = "auto"


class GraphReport(BaseModel):
    """One written graph."""

    name: str
    role: str
    nodes: int
    bytes: int


class BuildReport(BaseModel):
    """What was built. `bytes` is the whole bundle; `parameters` counts the target's numbers."""

    status: Literal["built"] = "built"
    output: Path
    model: str
    family: str
    cuts: list[int]
    drafts: list[str]
    speculative: bool
    parameters: int
    draft_parameters: int
    weight_bytes: int
    bytes: int
    graphs: list[GraphReport]
    parity: list[dict[str, Any]]
    plans: list[dict[str, Any]]
    notices: list[str]
    seconds: float


@dataclass
class Prepared:
    """A checked request: nothing is exported or written yet. Also the start of a dry run."""

    request: BuildRequest
    checkpoint: Checkpoint
    family: Family
    selection: DraftSelection
    cuts: list[int]
    fingerprint: str


@dataclass
class Exported:
    """All graphs of a bundle, in memory (they hold references, not weights), and the layout of the weights file."""

    graphs: list[GraphSpec]
    store: WeightStore
    parameters: int
    draft_parameters: int


def prepare(request: BuildRequest, *, identify: bool = True) -> Prepared:
    """Finds the model and the drafts and checks every option; raises the error that the user should read.

    Without `identify` no weight is read: the fingerprint stays empty and drafts are not matched with it (dry run).
    """
    if request.precision not in PRECISIONS:
        raise OptionError(
            f"--precision {request.precision!r} is not supported yet, only {', '.join(PRECISIONS)}"
        )
    for name, low, high in (
        ("max_length", 2, 1 << 20),
        ("max_batch", 1, 1024),
        ("max_width", 1, 1024),
        ("max_source", 1, 1 << 20),
    ):
        value = getattr(request, name)
        if not low <= value <= high:
            raise OptionError(f"--{name.replace('_', '-')} {value} is out of range {low}..{high}")
    checkpoint = open_checkpoint(request.model)
    family = family_for(checkpoint)
    if family.max_positions is not None and request.max_length > family.max_positions:
        raise OptionError(
            f"--max-length {request.max_length} is beyond the model's {family.max_positions} positions"
        )
    shape = family.decoder
    selection = select_drafts(
        request.model, checkpoint.alias, request.drafts, request.draft_layer, shape.num_layers
    )
    if not identify:
        return Prepared(request, checkpoint, family, selection, selection.cuts(shape.num_layers), "")
    identity = fingerprint(checkpoint)
    for draft in selection.drafts:
        draft.check_target(request.model, identity, shape.num_layers, shape.hidden_size)
    return Prepared(request, checkpoint, family, selection, selection.cuts(shape.num_layers), identity)


def export(prepared: Prepared, progress: Progress | None = None) -> Exported:
    """Traces every graph. No weight is read."""
    family, shape = prepared.family, prepared.family.decoder
    store = WeightStore([prepared.checkpoint.tensors])
    graphs: list[GraphSpec] = []

    def add(spec: GraphSpec) -> None:
        graphs.append(spec)
        if progress:
            progress("graphs", len(graphs), 0)

    for ref in family.tensors().values():
        store.slot(ref)
    for spec in family.graphs(prepared.cuts, store):
        add(spec)
    parameters = store.parameters
    for draft in prepared.selection.drafts:
        for spec in draft.graphs(store, family):
            add(spec)
        for ref in draft.tensors().values():
            store.slot(ref)
    add(
        GraphSpec(
            "commit",
            "commit",
            build_commit(store, range(shape.num_layers), shape.num_kv_heads, shape.head_dim),
        )
    )
    return Exported(graphs, store, parameters, store.parameters - parameters)


def build_bundle(request: BuildRequest, progress: Progress | None = None) -> BuildReport:
    """Builds a bundle at `request.output`; an existing one stays intact unless everything succeeds.

    Raises OptionError, ExportError or UnsupportedModelError, each with one line that names the cause and the remedy.
    """
    start = time.monotonic()
    check_output(request.output, request.force)
    prepared = prepare(request)
    plan_options = _plan_options(prepared)
    exported = export(prepared, progress)
    document = describe(prepared, exported)
    check_description(document)
    with replaced_folder(request.output, request.force) as folder:
        check_space(folder, exported.store.bytes + (16 << 20))
        exported.store.write(
            folder, (lambda done, total: progress("weights", done, total)) if progress else None
        )
        write_graphs(folder, exported.graphs, progress)
        write_tokenizer(prepared.checkpoint, folder)
        document["files"] = describe_files(folder, progress)
        write_manifest(folder, document)
        if request.parity:
            parity = _parity(folder, prepared, progress)
            document["parity"] = parity
            write_manifest(folder, document)
        if plan_options is not None:
            from ..tensorrt import add_plans

            add_plans(
                folder, plan_options, lambda _name, done, total: progress and progress("plans", done, total)
            )
            document = json.loads((folder / MANIFEST).read_text("utf-8"))
            write_manifest(folder, document)
        sizes = {f.relative_to(folder).as_posix(): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    return BuildReport(
        output=request.output,
        model=request.model,
        family=prepared.family.name,
        cuts=prepared.cuts,
        drafts=[d.name for d in prepared.selection.drafts],
        speculative=prepared.selection.speculative,
        parameters=exported.parameters,
        draft_parameters=exported.draft_parameters,
        weight_bytes=exported.store.bytes,
        bytes=sum(sizes.values()),
        graphs=[
            GraphReport(name=g.name, role=g.role, nodes=len(g.model.graph), bytes=sizes[f"{g.name}.onnx"])
            for g in exported.graphs
        ],
        parity=document["parity"],
        plans=document["plans"],
        notices=[*prepared.selection.notices, *generation_notices(document["generation"])],
        seconds=round(time.monotonic() - start, 2),
    )


def describe(prepared: Prepared, exported: Exported) -> dict[str, Any]:
    """The manifest without `files` and `parity` results (docs/architecture.md)."""
    request, family, checkpoint = prepared.request, prepared.family, prepared.checkpoint
    decoder = asdict(family.decoder)
    bias = decoder.pop("relative_bias")
    default = prepared.selection.default
    own = {name: ref for draft in prepared.selection.drafts for name, ref in draft.tensors().items()}
    source = (
        request.model
        if checkpoint.alias
        else checkpoint.folder.resolve().name
        if Path(request.model).is_dir()
        else request.model
    )
    return {
        "format": "vlmexport-bundle",
        "schema_version": SCHEMA_VERSION,
        "producer": _producer(),
        "model": {
            "source": source,
            "family": family.name,
            "architecture": checkpoint.architecture,
            "decoder": family.decoder_name,
            "fingerprint": prepared.fingerprint,
            "parameters": exported.parameters,
        },
        "weights_dtype": request.precision,
        "compute_dtype": request.precision,
        "cache_dtype": request.precision,
        "limits": {
            "max_length": request.max_length,
            "max_batch": request.max_batch,
            "max_width": request.max_width,
            "max_source": request.max_source if family.decoder.cross_attention else None,
        },
        "text": describe_text(checkpoint, family, request.default_prompt),
        "image": family.image(),
        "decoder": {
            **decoder,
            "cuts": prepared.cuts,
            "relative_bias": bias,
        },
        "encoder": family.encoder(),
        "graphs": {g.name: describe_graph(g) for g in exported.graphs},
        "weights": {"file": WEIGHTS_FILE, "bytes": exported.store.bytes},
        "tensors": describe_tensors(exported.store, {**family.tensors(), **own}),
        "drafts": [d.entry(request.precision) for d in prepared.selection.drafts],
        "policy": {
            "draft": None if default is None else default.name,
            "speculative": prepared.selection.speculative,
            "draft_length": min(prepared.selection.draft_length, max(1, request.max_width - 1)),
            "confidence_threshold": None,
        },
        "generation": describe_generation(checkpoint),
        "verify_width": None,
        "parity": [],
        "plans": [],
    }


def _producer() -> dict[str, str]:
    packages = ("vlmexport", "torch", "transformers", "onnx")
    now = (
        datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    )
    return {**{p: importlib.metadata.version(p) for p in packages}, "created": now}


def _plan_options(prepared: Prepared) -> PlanOptions | None:
    """The TensorRT plans that were asked for; raises at once when they cannot be built here."""
    request = prepared.request
    if request.backend is None:
        return None
    from ..tensorrt import PlanOptions
    from ..tensorrt.plans import check_plan_options

    options = PlanOptions(request.backend, request.target, request.plan_precision)
    check_plan_options(options, prepared.family.decoder_name)
    return options


def _parity(folder: Path, prepared: Prepared, progress: Progress | None) -> list[dict[str, Any]]:
    """Every graph, and a whole generation, against PyTorch; raises ExportError when one differs."""
    from ..parity import check_parity

    try:
        return check_parity(
            folder,
            prepared.checkpoint,
            drafts=prepared.selection.drafts,
            memory_limit=prepared.request.parity_memory,
            generation=prepared.family.name in RUNTIME_FAMILIES,
            progress=lambda _name, done, total: progress and progress("parity", done, total),
        )
    except ExportError as error:
        raise ExportError(f"{error}; no bundle was written") from error
