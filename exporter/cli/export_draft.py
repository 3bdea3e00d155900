"""`vlmexport export-draft`: a trained draft as a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path

import typer

from ...runtime.commands.options import AsJson
from ...runtime.common.optional_deps import need_extra
from .progress import tell_loading


def export_draft(
    draft: Path = typer.Argument(..., metavar="DRAFT", help="Folder of a trained draft."),
    output: Path = typer.Option(
        ..., "-o", "--output", metavar="DIR", help="Folder of the checkpoint; a new one."
    ),
    form: str = typer.Option(
        "speculators",
        "--format",
        metavar="speculators|eagle|medusa",
        help="Format of the checkpoint: of the package speculators, of EAGLE's authors (vLLM and SGLang read it), or of vLLM's "
        "Medusa.",
    ),
    model: str = typer.Option(
        None,
        "--model",
        rich_help_panel="Input",
        metavar="ALIAS|DIR|HUB_ID",
        help="The draft's target; default: where it was trained.",
    ),
    as_json: AsJson = False,
) -> None:
    """Write a trained draft as a checkpoint that other programs read."""
    need_extra("export", "`vlmexport export-draft`")
    from ...runtime.commands.output import console, print_json, quantity
    from ..early_checks import check_export
    from .quiet import quiet_torch

    check_export(draft, output, form, model)
    tell_loading()
    with quiet_torch():
        from ..pipeline.export_draft import export_draft as export

        report = export(draft, output, form, model)
    if as_json:
        print_json(report.to_dict())
        return
    out = console()
    out.print(
        f"{report.output}: {report.kind} for {report.verifier} ({', '.join(report.architectures)}), "
        f"{quantity(report.parameters)} parameters, format {report.format}",
        markup=False,
    )
    for notice in report.notices:
        out.print(notice, markup=False)
