"""Writes the plans of a bundle and their entries in the manifest."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...runtime.bundle.folder import Bundle
from ...runtime.bundle.manifest import FileInfo
from ...runtime.bundle.plans import planned
from ...runtime.common.errors import ExportError
from ...runtime.common.foreign_errors import raise_if_foreign
from ...runtime.graphs.registry import reads_prompts
from ..graphs.retype import WIDE_RESIDUAL
from . import api
from .builder import BuiltPlan, build_plan
from .graph_copy import CopyOptions
from .options import PlanOptions, resolve
from .profiles import Sizes, profiles_for

SMALL_SHARED = 4096
"""Weights up to this size (bytes) may be in two plans (norms, frequencies); they are listed all the same."""

Progress = Callable[[str, int, int], None]
"""(graph, done, total)"""


@dataclass
class PlanReport:
    """What was built, for the summary."""

    backend: str
    target: str
    precision: str
    lowering: str
    version: str
    entries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all plans."""
        return sum(e["bytes"] for e in self.entries)


SHARED_TABLES = ("embedding_table", "lm_head_table")
"""Tensors of a manifest that graphs take as inputs where they are weights of several: a tied LM head is the first."""


def add_plans(bundle: Bundle, options: PlanOptions, progress: Progress | None = None) -> PlanReport:
    """Builds the plan of every graph of `bundle` into `plans/<backend>/<target>/` of its folder, in place of those that it
    has for that backend and target, and completes its manifest's `plans` and `files`, in memory: writing it is the
    caller's.

    The folder must be one that nobody reads yet (a build's temporary folder): files are added before the manifest.
    Raises ExportError when a graph cannot be built, or a weight would be in two plans; folder and manifest are then as
    they were.
    """
    folder, manifest = bundle.path, bundle.manifest
    wanted = resolve(options, manifest.model.decoder, manifest.weights_dtype)
    sizes = Sizes.of_manifest(manifest, options.backend)
    copy_options = CopyOptions(
        wanted.precision,
        sizes.max_length + sizes.max_width,
        wide_residual=wanted.precision == "float16" and manifest.model.decoder in WIDE_RESIDUAL,
        shared_inputs={
            (manifest.tensors[name].file or manifest.weights.file, manifest.tensors[name].offset): name
            for name in reversed(SHARED_TABLES)
            if name in manifest.tensors
        },
        source=manifest.weights_dtype,
        lowering=wanted.lowering,
    )
    library = wanted.library
    built_with = None if library.cross_compiles else api.local_cuda()
    report = PlanReport(library.backend, wanted.target, wanted.precision, wanted.lowering, library.version)
    places: dict[tuple[str, int], tuple[str, str, int]] = {}
    shared: list[dict[str, Any]] = []
    files: dict[str, FileInfo] = {}
    scratch = Path(tempfile.mkdtemp(prefix=".trt-", dir=folder))
    made = scratch / "plans"
    made.mkdir()
    try:
        graphs = sorted(planned(manifest).items())
        for done, (name, graph) in enumerate(graphs):
            if progress:
                progress(name, done, len(graphs))
            profiles = profiles_for(graph.role, sizes, reads_prompts(graph))
            copies = scratch / name
            source = folder / graph.file
            plan = build_plan(library, wanted.capability, source, copies, copy_options, profiles, wanted.lean)
            entry = _entry(name, plan, report, [(p.name, p) for p in profiles])
            entry["lean"] = wanted.lean
            if built_with is not None:
                entry["driver"], entry["cuda"] = built_with.driver, built_with.runtime
            shared += _shared_weights(name, plan, places)
            entry["sha256"] = _write(made / f"{name}.plan", plan.data)
            files[entry["file"]] = FileInfo(bytes=entry["bytes"], sha256=entry["sha256"])
            report.entries.append(entry)
            shutil.rmtree(copies)
        for entry in report.entries:
            entry["shared_weights"] = [s for s in shared if entry["graph"] in s["graphs"]]
        _forget(bundle, library.backend, wanted.target)
        target = folder / "plans" / library.backend / wanted.target
        target.parent.mkdir(parents=True, exist_ok=True)
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    manifest.plans += report.entries
    manifest.files |= files
    if progress:
        progress("", len(graphs), len(graphs))
    return report


def _forget(bundle: Bundle, backend: str, target: str) -> None:
    """Removes the plans of a backend and target: their entries, and their files from the folder and the list."""
    manifest = bundle.manifest
    old = [p for p in manifest.plans if (p.get("backend"), p.get("target")) == (backend, target)]
    for file in {str(plan["file"]) for plan in old}:
        (bundle.path / file).unlink(missing_ok=True)
        manifest.files.pop(file, None)
        with contextlib.suppress(OSError):  # other plans lie there
            (bundle.path / file).parent.rmdir()
    manifest.plans = [plan for plan in manifest.plans if plan not in old]


def _entry(name: str, plan: BuiltPlan, report: PlanReport, profiles: list[tuple[str, Any]]) -> dict[str, Any]:
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
        "file": f"plans/{report.backend}/{report.target}/{name}.plan",
        "target": report.target,
        "backend": report.backend,
        "version": report.version,
        "precision": report.precision,
        "lowering": report.lowering,
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
    entries = []
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
        entries.append({"tensor": tensor, "bytes": size, "graphs": [graph, name]})
    return entries


def _write(path: Path, data: Any) -> str:
    view = memoryview(data)
    try:
        with path.open("wb") as file:
            file.write(view)
    except OSError as error:
        raise_if_foreign(error)
        raise ExportError(
            f"{path.name} ({len(view) / 1e6:.1f} MB) cannot be written: {error.strerror}"
        ) from error
    return hashlib.sha256(view).hexdigest()
