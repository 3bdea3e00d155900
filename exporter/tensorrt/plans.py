"""Writes the plans of a bundle and their entries in the manifest."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import FileInfo
from ...runtime.errors import ExportError, OptionError
from ..families.languages import language_class
from .api import load_tensorrt, resolve_target
from .builder import BuiltPlan, build_plan
from .graph_copy import PRECISIONS, CopyOptions
from .profiles import Sizes, profiles_for

PLAN_PRECISIONS = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"} | {
    p: p for p in PRECISIONS
}
SMALL_SHARED = 4096
"""Weights up to this size (bytes) may be in two plans (norms, frequencies); they are listed all the same."""

Progress = Callable[[str, int, int], None]
"""(graph, done, total)"""


@dataclass(frozen=True)
class PlanOptions:
    """What to build. `precision`: auto (bfloat16 for T5 where the target has it, else float16), fp16, bf16 or fp32."""

    backend: str = "tensorrt-rtx"
    target: str = "sm86"
    precision: str = "auto"


@dataclass
class PlanReport:
    """What was built, for the summary."""

    target: str
    precision: str
    version: str
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all plans."""
        return sum(e["bytes"] for e in self.entries)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of all plans beyond their weights."""
        return sum(e["overhead_bytes"] for e in self.entries)


def plan_precision(precision: str, target: str, decoder: str, source: str = "float32") -> str:
    """The dtype of the plans of a bundle whose graphs are of type `source`. Raises OptionError for an unknown one, for
    one that Turing (sm75) does not have, and for another than a narrow bundle has."""
    if precision not in PLAN_PRECISIONS:
        raise OptionError(f"unknown --plan-precision {precision!r}; choose auto, fp16, bf16 or fp32")
    wanted = PLAN_PRECISIONS[precision]
    if source != "float32":
        if wanted not in ("auto", source):
            raise OptionError(
                f"--plan-precision {precision} does not fit a bundle of {source}, whose plans take its graphs as they are; "
                "leave it out, or build with --precision float32"
            )
        wanted = source
    has_bfloat = target != "sm75"
    if wanted == "bfloat16" and not has_bfloat:
        raise OptionError(
            f"--plan-precision {precision} cannot be built for {target}, which has no bfloat16; use fp16"
        )
    if wanted == "float32" and target == "sm75":
        raise OptionError(
            f"--plan-precision {precision} cannot be built for {target}: TensorRT has no float32 products there; use fp16"
        )
    if wanted == "auto":
        return "bfloat16" if language_class(decoder).wide_residual and has_bfloat else "float16"
    return wanted


def check_plan_options(
    options: PlanOptions, decoder: str = "llama", source: str = "float32"
) -> tuple[str, str]:
    """(target, precision) as they will be built; raises before any work when TensorRT or an option is missing."""
    library = load_tensorrt(options.backend)
    target, _ = resolve_target(library, options.target)
    return target, plan_precision(options.precision, target, decoder, source)


SHARED_TABLES = ("embedding_table", "lm_head_table")
"""Tensors of a manifest that graphs take as inputs where they are weights of several: a tied LM head is the first."""


def add_plans(bundle: Bundle, options: PlanOptions, progress: Progress | None = None) -> PlanReport:
    """Builds the plan of every graph of `bundle` into `plans/<target>/` of its folder, and completes its manifest's
    `plans` and `files`, in memory: writing it is the caller's.

    The folder must be one that nobody reads yet (a build's temporary folder): files are added before the manifest.
    Raises ExportError when a graph cannot be built, or a weight would be in two plans; the manifest is then unchanged.
    """
    folder, manifest = bundle.path, bundle.manifest
    library = load_tensorrt(options.backend)
    target, capability = resolve_target(library, options.target)
    source = manifest.weights_dtype
    precision = plan_precision(options.precision, target, manifest.model.decoder, source)
    sizes = Sizes.of_manifest(manifest)
    copy_options = CopyOptions(
        precision,
        sizes.max_length + sizes.max_width,
        wide_residual=precision == "float16" and language_class(manifest.model.decoder).wide_residual,
        shared_inputs={
            (manifest.tensors[name].file or manifest.weights.file, manifest.tensors[name].offset): name
            for name in reversed(SHARED_TABLES)
            if name in manifest.tensors
        },
        source=source,
    )
    report = PlanReport(target, precision, library.version)
    places: dict[tuple[str, int], tuple[str, str, int]] = {}
    shared: list[dict[str, Any]] = []
    files: dict[str, FileInfo] = {}
    (folder / "plans" / target).mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".trt-", dir=folder))
    try:
        for done, (name, graph) in enumerate(sorted(manifest.graphs.items())):
            if progress:
                progress(name, done, len(manifest.graphs))
            profiles = profiles_for(graph.role, sizes)
            plan = build_plan(library, capability, folder / graph.file, scratch, copy_options, profiles)
            entry = _entry(name, plan, report, library.backend, [(p.name, p) for p in profiles])
            shared += _shared_weights(name, plan, places)
            entry["sha256"] = _write(folder / entry["file"], plan.data)
            files[entry["file"]] = FileInfo(bytes=entry["bytes"], sha256=entry["sha256"])
            report.entries.append(entry)
            for leftover in scratch.iterdir():
                leftover.unlink()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for entry in report.entries:
        entry["shared_weights"] = [s for s in shared if entry["graph"] in s["graphs"]]
    manifest.plans = [p for p in manifest.plans if p.get("target") != target] + report.entries
    manifest.files |= files
    if progress:
        progress("", len(manifest.graphs), len(manifest.graphs))
    return report


def _entry(
    name: str, plan: BuiltPlan, report: PlanReport, backend: str, profiles: list[tuple[str, Any]]
) -> dict[str, Any]:
    summary = plan.summary

    def bindings(
        values: Mapping[str, tuple[str, Any]], shapes: Mapping[str, Any], mode: str
    ) -> list[dict[str, Any]]:
        made = []
        for tensor, (dtype, _) in values.items():
            row: dict[str, Any] = {
                "name": tensor,
                "mode": mode,
                "dtype": dtype,
                "shape": list(shapes[tensor]),
            }
            if tensor in summary.aliases:
                row["alias_of"] = summary.aliases[tensor]
            made.append(row)
        return made

    return {
        "graph": name,
        "file": f"plans/{report.target}/{name}.plan",
        "target": report.target,
        "backend": backend,
        "version": report.version,
        "precision": report.precision,
        "bytes": plan.bytes,
        "weight_bytes": plan.copy.weight_bytes,
        "overhead_bytes": plan.bytes - plan.copy.weight_bytes,
        "fused_attention": plan.fused_attention,
        "layers": dict(sorted(summary.layers.items())),
        "bindings": bindings(summary.inputs, plan.input_shapes, "input")
        + bindings(summary.outputs, plan.output_shapes, "output"),
        "profiles": [
            {"name": label, "dimensions": {d: list(r) for d, r in profile.ranges.items() if _has(plan, d)}}
            for label, profile in profiles
        ],
        "executed": False,
    }


def _has(plan: BuiltPlan, dimension: str) -> bool:
    return any(dimension in shape for shape in plan.input_shapes.values())


def _shared_weights(
    name: str, plan: BuiltPlan, places: dict[tuple[str, int], tuple[str, str, int]]
) -> list[dict[str, Any]]:
    """Weights of this plan that an earlier plan holds too; an error unless they are small."""
    found = []
    for tensor, (size, place) in plan.copy.weights.items():
        if place is None:
            continue
        graph, _, _ = places.setdefault(place, (name, tensor, size))
        if graph == name:
            continue
        if size > SMALL_SHARED:
            raise ExportError(
                f"the weight {tensor} ({size / 1e6:.2f} MB) would be in two plans, {graph} and {name}; TensorRT cannot share it"
            )
        found.append({"tensor": tensor, "bytes": size, "graphs": [graph, name]})
    return found


def _write(path: Path, data: Any) -> str:
    view = memoryview(data)
    try:
        with path.open("wb") as file:
            file.write(view)
    except OSError as error:
        raise ExportError(
            f"{path.name} ({len(view) / 1e6:.1f} MB) cannot be written: {error.strerror}"
        ) from error
    return hashlib.sha256(view).hexdigest()
