"""The commands `models` and `verify`, and where all of this room are registered. Everything heavy is imported when a command runs."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from ...runtime.commands.option_flags import with_flags
from ...runtime.commands.options import AsJson, Bundle
from ...runtime.common.errors import OptionError
from ...runtime.common.optional_deps import need_extra
from ...runtime.common.options import Files, Integer, Text, Texts
from ...runtime.engines import DEVICES
from ..common.memory import use_large_pages
from ..common.sizes import parse_size
from ..pipeline.request import ADAPTER
from .build import build
from .compile import compile_plans
from .export_draft import export_draft
from .fit import fit
from .progress import shown, tell_loading
from .quiet import quiet_torch

log = logging.getLogger(__name__)


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command("models")(models)
    app.command("build")(build)
    app.command("verify")(verify)
    app.command("fit")(fit)
    app.command("compile")(compile_plans)
    app.command("export-draft")(export_draft)


def models(as_json: AsJson = False) -> None:
    """List the models that can be exported, and their drafts."""
    need_extra("export", "`vlmexport models`")
    from ...runtime.commands.output import console, print_json
    from ..common.aliases import ALIASES
    from ..common.tiny_models import find_tiny_models, install_command
    from ..drafts import draft_kinds
    from ..drafts.folders import shipped_drafts
    from ..families.registry import architectures

    untrained = {kind.name: kind.title for kind in draft_kinds() if not kind.trained}
    rows = []
    for alias in ALIASES:
        drafts = [draft.name for draft in shipped_drafts(alias)]
        rows.append(
            {
                "alias": alias.name, "family": alias.family, "source": alias.hub_id or "bundled",
                "description": alias.description, "drafts": drafts,
            }
        )  # fmt: skip
    if as_json:
        print_json({"schema_version": 1, "models": rows, "architectures": architectures()})
        return
    _print_models(rows)
    if find_tiny_models() is None:
        console().print(
            f"The tiny models (source: bundled) are not installed: {install_command()}", markup=False
        )
    console().print(
        f"Any folder or hub id of a supported class works too ({', '.join(architectures())}). Every model also has the drafts "
        + ", ".join(f"{name} ({title})" for name, title in untrained.items())
        + "."
    )


def _print_models(rows: list[dict[str, Any]]) -> None:
    from ...runtime.commands.output import console
    from ...runtime.commands.table import Table

    table = Table()
    table.add_column("alias", whole=True)
    table.add_column("family", whole=True, drop=2)
    table.add_column("source", whole=True, drop=1)
    for name in ("trained drafts", "description"):
        table.add_column(name, wrap=True)
    for row in rows:
        drafts = ", ".join(row["drafts"]) or "–"
        table.add_row(row["alias"], row["family"], row["source"], drafts, row["description"])
    console().print(table)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is compared, and with what."""

    model: Annotated[
        str, Text(group="Input", metavar="ALIAS|DIR|HUB_ID", help="The model that the bundle was built from.")
    ]
    adapter: Annotated[str | None, ADAPTER] = None
    draft: Annotated[
        list[str],
        Texts(
            group="Speculation",
            metavar="PATH",
            help="Folder of a trained draft in the bundle. Repeat for several.",
        ),
    ] = field(default_factory=list)
    prompts: Annotated[
        int, Integer(low=1, group="Input", metavar="N", help="Requests on which losslessness is checked.")
    ] = 3
    max_new_tokens: Annotated[int, Integer(low=1, metavar="N", help="Tokens of each request.")] = 24
    image: Annotated[
        list[Path],
        Files(
            group="Input", metavar="FILE", help="Images to use instead of generated ones. Repeat for several."
        ),
    ] = field(default_factory=list)
    parity_memory: Annotated[
        str | None,
        Text(
            group="Engine", metavar="SIZE",
            help="Compare layer by layer when the parameters take more memory than this. Default: when they would not fit.",
        ),
    ] = None  # fmt: skip
    certificate: Annotated[
        int | None,
        Integer(
            low=1, group="Output", metavar="N",
            help="Decode N requests by every draft with chains and trees of all sizes, allow no near-tie, and write the outcome "
            "into the bundle.",
        ),
    ] = None  # fmt: skip
    device: Annotated[
        str, Text(group="Engine", metavar="|".join(DEVICES), help="What computes the bundle's side.")
    ] = "cpu"
    lossy: Annotated[str | None, Text(hidden=True)] = None


@with_flags
def verify(bundle: Bundle, asked: VerifyOptions, as_json: AsJson = False) -> None:
    """Compare a bundle with its model: parity and losslessness."""
    if asked.lossy is not None:
        raise OptionError(
            f"--lossy {asked.lossy}: verify checks that the output is the model's, which lossy acceptance gives up; leave it out"
        )
    need_extra("export", "`vlmexport verify`")
    use_large_pages()
    from ...runtime.bundle.manifest_changes import check_writable
    from ...runtime.commands.output import console, print_json
    from ...runtime.commands.requests import read_picture
    from ..early_checks import check_verify

    size = None if asked.parity_memory is None else parse_size(asked.parity_memory, "--parity-memory")
    pictures = [read_picture(path) for path in asked.image]  # refused before hours of comparing
    check_verify(bundle, asked.model, asked.draft, asked.adapter)
    if asked.certificate is not None:
        check_writable(bundle)
    tell_loading()
    from ..parity.verify import VerifySettings, verify_bundle

    settings = VerifySettings(
        prompts=asked.prompts, max_new_tokens=asked.max_new_tokens, images=pictures, parity_memory=size,
        device=asked.device, certificate=asked.certificate,
    )  # fmt: skip
    with quiet_torch(), shown(as_json) as progress:
        log.debug(
            "comparing %s with %s: %d prompts of %d tokens",
            bundle, asked.model, asked.prompts, asked.max_new_tokens,
        )  # fmt: skip
        report = verify_bundle(
            bundle,
            asked.model,
            [Path(d) for d in asked.draft],
            settings,
            progress=progress,
            adapter=asked.adapter,
        )
    log.debug("%d files have their SHA-256", report.files_checked)
    if as_json:
        print_json({"schema_version": 1, **report.to_dict()})
    else:
        from .tables import verify_tables

        for table in verify_tables(report):
            console().print(table)
        sys.stdout.write(("Verified." if report.ok else "NOT verified.") + "\n")
    if not report.ok:
        raise typer.Exit(1)
