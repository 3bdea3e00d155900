"""`vlmexport fit`: whether a bundle, or a model that is not built yet, fits devices, and what their bandwidth allows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...runtime.commands.options import AsJson
from ...runtime.errors import OptionError
from ...runtime.extras import need_extra
from ...runtime.measure.devices import DEVICES, FAMILY, device_named

if TYPE_CHECKING:
    from rich.console import Console

    from ...runtime.bundle.manifest import Manifest


def fit(
    what: str = typer.Argument(metavar="BUNDLE|MODEL", help="A bundle; or an alias, folder or hub id of a model."),
    target: list[str] = typer.Option(None, "--target", metavar="DEVICE", help=f"{', '.join(DEVICES)} ({FAMILY} may be left out). Repeatable; default: all."),
    max_length: int = typer.Option(None, "--max-length", metavar="N", help="Tokens of a sequence. Default: the bundle's most."),
    batch: int = typer.Option(1, "--batch", metavar="N", min=1, help="Sequences at a time."),
    acceptance: float = typer.Option(0.8, "--acceptance", metavar="A", min=0.0, max=1.0, help="Of a drafted token."),
    draft_layer: int = typer.Option(None, "--draft-layer", metavar="N", help="Of a model, as in `build`."),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say what would fit and how fast memory allows it to be: arithmetic, nothing is run."""
    from ...runtime.commands.output import console, print_json
    from ...runtime.measure.fit import check_size
    from ...runtime.measure.fit import fit as fitted

    devices = [device_named(name) for name in target or DEVICES]
    if None in devices:
        unknown = (target or [])[devices.index(None)]
        raise OptionError(f"--target {unknown!r:.60} is unknown; choose from {', '.join(DEVICES)}")
    manifest = _manifest(what, draft_layer, max_length, batch)
    length = check_size(manifest, max_length, batch)
    found = [
        fitted(manifest, device, length=length, batch=batch, acceptance=acceptance)
        for device in devices
        if device is not None
    ]
    if as_json:
        about = {"model": manifest.model.source, "length": length, "batch": batch}
        print_json({"schema_version": 1, **about, "devices": found})
    else:
        show(found, manifest, length, batch, console())


def _manifest(what: str, draft_layer: int | None, max_length: int | None, batch: int) -> Manifest:
    """Of a bundle; of a model, as a build would write it."""
    from ...runtime.bundle.folder import MANIFEST, Bundle

    if (Path(what) / MANIFEST).is_file():
        if draft_layer is not None:
            raise OptionError("--draft-layer is for a model; a bundle has its drafts already")
        return Bundle.open(what).manifest
    need_extra("export", "`vlmexport fit MODEL`")
    from ..build.export import export
    from ..build.prepare import prepare
    from ..build.request import BuildRequest
    from .app import quiet_torch

    with quiet_torch():
        request = BuildRequest(
            model=what, output=Path("fit"), force=True, draft_layer=draft_layer, max_length=max_length, max_batch=max(16, batch)
        )  # fmt: skip
        prepared = prepare(request, write=False)
        export(prepared)
    return prepared.manifest


def show(found: list[dict[str, Any]], manifest: Manifest, length: int, batch: int, out: Console) -> None:
    """Print the devices for people."""
    from rich.table import Table

    from ...runtime.commands.output import size

    title = f"{manifest.model.source}: {batch} × {length} tokens, plans of 16 bits"
    table = Table(title=f"{title} — arithmetic, not measured")
    table.add_column("device", no_wrap=True)
    for name in ("needs", "has", "", "tokens/s ≤"):
        table.add_column(name, justify="right")
    table.add_column(f"with {manifest.policy.draft or 'a draft'} accepted at {found[0]['acceptance']:g}")
    table.add_column("lowering, from")
    for row in found:
        own = row["drafts"].get(manifest.policy.draft)
        drafted = f"{own['tokens_per_second']:.0f} (at {own['draft_length']})" if own else ""
        table.add_row(
            row["device"], size(row["needed"]["total"]), size(row["memory"]), "fits" if row["fits"] else "does not fit",
            f"{row['tokens_per_second']:.0f}", drafted,
            "; ".join(f"{name}: {oldest}" for name, oldest in row["lowering"].items()),
        )  # fmt: skip
    out.print(table)
    needed = ", ".join(
        f"{part.replace('_', ' ')} {size(count)}"
        for part, count in found[0]["needed"].items()
        if count and part != "total"
    )
    out.print(f"{found[0]['title']}: {needed}", markup=False)
    for row in found if len(found) <= 3 else []:
        out.print(f"{row['title']}: {row['runs_with']}", markup=False)
    out.print(
        "One sequence's speed if reading weights and cache at the memory's peak bandwidth were all there is.",
        markup=False,
    )
