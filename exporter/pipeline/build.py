"""`vlmexport build`: a model and its drafts become a bundle. The way is described in the package's docstring."""

from __future__ import annotations

from ...runtime.bundle.folder import Bundle
from ...runtime.common.errors import ExportError
from ...runtime.families import FAMILIES as RUNTIME_FAMILIES
from ..common.memory import return_large_buffers
from ..output import check_space, describe_files, replaced_folder, write_manifest
from .checks import SPARE_BYTES
from .example import write_example
from .export import Exported, export
from .links import linked_shards
from .prepare import identify, prepare
from .prepared import Prepared
from .report import BuildReport, GraphReport
from .request import BuildRequest, Progress
from .text import write_tokenizer
from .timing import Stages
from .write import write_graphs


def build_bundle(request: BuildRequest, progress: Progress | None = None) -> BuildReport:
    """Builds a bundle at `request.output`; an existing one stays intact unless everything succeeds.

    Raises OptionError, ExportError or UnsupportedModelError, each with one line that names the cause and the remedy.
    """
    stages = Stages()
    return_large_buffers()
    with stages("checks"):
        prepared = prepare(request)
    manifest = prepared.manifest
    with replaced_folder(request.output, request.force) as folder:
        with stages("fingerprint"):
            identify(prepared)
        with stages("graphs"):
            exported = export(prepared, progress)
        check_space(folder, exported.store.bytes + SPARE_BYTES)
        with stages("files"):
            exported.store.write(
                folder, (lambda done, total: progress("weights", done, total)) if progress else None
            )
            with linked_shards(exported.store.shards, folder):
                write_graphs(folder, exported.graphs, progress)
            write_tokenizer(prepared.checkpoint, folder)
            write_example(prepared.checkpoint, folder)
        bundle = Bundle(folder, manifest)
        if request.parity:
            with stages("parity"):
                _compare(bundle, prepared, progress)
        if prepared.plans is not None:
            from ..tensorrt import add_plans

            with stages("plans"):
                add_plans(
                    bundle,
                    prepared.plans,
                    (lambda name, done, total: progress("plans", done, total, name)) if progress else None,
                )
        with stages("checksums"):
            manifest.files = describe_files(folder, manifest.files, progress)
            written = write_manifest(folder, manifest)
    return _report(prepared, exported, written, stages)


def _compare(bundle: Bundle, prepared: Prepared, progress: Progress | None) -> None:
    """Every graph, and a whole generation, against PyTorch; raises ExportError when one differs."""
    from ..parity import check_parity

    try:
        bundle.manifest.parity = check_parity(
            bundle,
            prepared.checkpoint,
            drafts=prepared.selection.drafts,
            memory_limit=prepared.request.parity_memory,
            generation=prepared.family.name in RUNTIME_FAMILIES,
            progress=lambda _name, done, total: progress and progress("parity", done, total),
        )
    except ExportError as error:
        raise ExportError(f"{error}; no bundle was written") from error


def _report(prepared: Prepared, exported: Exported, manifest_bytes: int, stages: Stages) -> BuildReport:
    request, manifest, selection = prepared.request, prepared.manifest, prepared.selection
    sizes = {name: file.bytes for name, file in manifest.files.items()}
    return BuildReport(
        output=request.output,
        model=request.model,
        family=prepared.family.name,
        cuts=prepared.cuts,
        drafts=[d.name for d in selection.drafts],
        draft_precisions=selection.precisions,
        speculative=selection.speculative,
        parameters=exported.parameters,
        draft_parameters=exported.draft_parameters,
        weight_bytes=exported.store.bytes,
        linked_bytes=sum(manifest.weights.linked.values()),
        bytes=sum(sizes.values()) + manifest_bytes,
        graphs=[
            GraphReport(
                name=g.name, role=g.role, nodes=len(g.model.graph), bytes=sum(sizes[name] for name in g.files)
            )
            for g in exported.graphs
        ],
        parity=manifest.parity,
        plans=manifest.plans,
        notices=prepared.notices,
        seconds=stages.total,
        stages=stages.seconds,
    )
