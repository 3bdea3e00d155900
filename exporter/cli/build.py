"""`vlmexport build`: its flags are the fields of `BuildRequest`."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from ...runtime.commands.option_flags import with_flags
from ...runtime.commands.options import AsJson
from ...runtime.common.optional_deps import need_extra
from ..common.memory import use_large_pages
from ..pipeline.request import BACKENDS, BuildRequest
from .progress import shown, tell_loading
from .quiet import quiet_torch

log = logging.getLogger(__name__)


@with_flags
def build(
    request: BuildRequest,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel="Output",
            help="Say what would be built and needed, and write nothing.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export a model as a bundle."""
    need_extra("export", "`vlmexport build`")
    use_large_pages()
    from ...runtime.commands.output import print_json
    from ...runtime.common.errors import OptionError
    from ..early_checks import check_build

    for option, value in (
        ("--target", request.target),
        ("--lowering", request.lowering),
        ("--plan-precision", request.plan_precision),
    ):
        if value not in (None, "auto") and request.backend is None:
            raise OptionError(f"{option} {value} needs --backend {BACKENDS}")
    with quiet_torch():
        check_build(request, write=not dry_run)
        tell_loading()
        _tell_request(request)
        if dry_run:
            from ..pipeline.dry_run import dry_run as try_build

            with shown(as_json) as progress:
                plan = try_build(request, progress)
            if as_json:
                print_json({"schema_version": 1, **plan.model_dump(mode="json")})
            else:
                _print_dry_run(plan)
            return
        from ..pipeline.build import build_bundle

        with shown(as_json) as progress:
            report = build_bundle(request, progress)
    _tell_report(report)
    if as_json:
        print_json({"schema_version": 1, **report.model_dump(mode="json")})
    else:
        _print_report(report)


def _tell_request(request: Any) -> None:
    """With `-v`: what is asked for, and what it is done with."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    import torch

    from ...runtime.hardware.machine import describe

    machine = describe()
    log.debug(
        "model %s, drafts: %s, precision %s, up to %s tokens, batch %d, width %d; output %s",
        request.model,
        ", ".join(request.drafts) or "the model's own",
        request.precision, request.max_length or "as many as it needs", request.max_batch, request.max_width, request.output,
    )  # fmt: skip
    log.debug(
        "machine: %s, %d cores, load %s; PyTorch %s with %d threads",
        machine["cpu"], machine["cores"], machine["load"], torch.__version__, torch.get_num_threads(),
    )  # fmt: skip


def _tell_report(report: Any) -> None:
    """With `-v`: every graph, the weights, and how long the stages of a build took."""
    from ...runtime.commands.output import quantity, size
    from ..pipeline.timing import stage_line

    for graph in report.graphs:
        log.debug("graph %s (%s): %d nodes, %s", graph.name, graph.role, graph.nodes, size(graph.bytes))
    log.debug(
        "weights: %s, every tensor once; %s parameters and %s of drafts",
        size(report.weight_bytes), quantity(report.parameters), quantity(report.draft_parameters),
    )  # fmt: skip
    log.debug("stages: %s; %.1f s in all", stage_line(report.stages), report.seconds)


def _print_dry_run(report: Any) -> None:
    from ...runtime.commands.output import console
    from .tables import dry_run_tables

    for table in dry_run_tables(report):
        console().print(table)
    for notice in report.notices:
        console().print(notice, markup=False)
    console().print("Nothing was written.")


def _print_report(report: Any) -> None:
    from ...runtime.commands.output import console, quantity
    from ...runtime.commands.plans import plans_tables
    from ...runtime.commands.verbosity import is_verbose
    from ..pipeline.timing import stage_line
    from .tables import bundle_size, draft_names, parity_line, parity_table, quantization_notes

    out = console()
    if report.parity:
        out.print(parity_table(report.parity) if is_verbose() else parity_line(report.parity))
        for note in quantization_notes(report.parity):
            out.print(note, markup=False)
    for table in plans_tables(report.plans):
        out.print(table)
    drafts = draft_names(report.drafts, report.draft_precisions, report.speculative)
    out.print(
        f"{report.output}: {report.family}, {quantity(report.parameters)} parameters, "
        f"{bundle_size(report.bytes, report.linked_bytes)}, decoder cut at "
        f"{report.cuts}, drafts: {drafts}, {report.seconds:.0f} s",
        markup=False,
    )
    out.print(f"Time: {stage_line(report.stages)}", markup=False)
    for notice in report.notices:
        out.print(notice, markup=False)
    example = "--image IMAGE" if report.family not in ("llama", "t5") else '--prompt "…"'
    out.print(f"Next: vlmexport run {report.output} {example}", markup=False)
