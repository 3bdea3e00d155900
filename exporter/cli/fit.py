"""`vlmexport fit`: whether a bundle, or a model that is not built yet, fits devices, and what their bandwidth allows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ...runtime.commands.options import AsJson
from ...runtime.common.errors import OptionError
from ...runtime.common.optional_deps import need_extra
from ...runtime.hardware.devices import DEVICES, FAMILY, Device, devices_named, nearest_devices, short_name

if TYPE_CHECKING:
    from rich.console import Console

    from ...runtime.bundle.manifest import Manifest
    from ..common.published_shapes import Shapes

ALL, EVERY = "all", ("float", "int8", "int4")
"""A value of `--weights`, and what it stands for."""


def fit(
    what: str = typer.Argument(metavar="BUNDLE|MODEL", help="A bundle; or an alias, folder or hub id of a model."),
    target: list[str] = typer.Option(None, "--target", rich_help_panel="Engine", metavar="DEVICE", help=f"{', '.join(map(short_name, DEVICES))}; {FAMILY}… and beginnings are known, too. Repeatable; default: all."),
    max_length: int = typer.Option(None, "--max-length", rich_help_panel="Generation", metavar="N", help="Tokens of a sequence. Default: the bundle's most."),
    batch: int = typer.Option(1, "--batch", rich_help_panel="Generation", metavar="N", min=1, help="Sequences at a time."),
    acceptance: float = typer.Option(0.8, "--acceptance", rich_help_panel="Speculation", metavar="A", min=0.0, max=1.0, help="Share of drafted tokens that is accepted."),
    draft_layer: int = typer.Option(None, "--draft-layer", rich_help_panel="Speculation", metavar="N", help="For a model: cut its decoder after N layers, as in `build`."),
    weights: list[str] = typer.Option(None, "--weights", rich_help_panel="Engine", metavar="KIND", help="For a model: its weights, as in `build`: float, int8, int4[,PART=KIND…]. Repeatable; `all`: float, int8 and int4."),
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Say what would fit and how fast memory allows it to be: arithmetic, nothing is run."""
    from ...runtime.commands.output import console, print_json
    from ...runtime.measure.fit import check_size
    from ...runtime.measure.fit import fit as fitted

    devices = chosen_devices(target or list(DEVICES))
    plans = [_manifest(what, draft_layer, max_length, batch, kind) for kind in chosen_weights(weights or [])]
    manifest = plans[0][0]
    length = check_size(manifest, max_length, batch)
    answers = [
        fitted(manifest, device, length=length, batch=batch, acceptance=acceptance, most=most)
        for device in devices
        for manifest, most in plans
    ]
    if as_json:
        about = {"model": manifest.model.source, "length": length, "batch": batch}
        print_json({"schema_version": 1, **about, "devices": answers})
    else:
        show(answers, manifest, length, batch, console())


def chosen_weights(kinds: Sequence[str]) -> list[str | None]:
    """What `--weights` means, each once; None where nothing was said."""
    every = [part for kind in kinds for part in (EVERY if kind == ALL else (kind,))]
    return list(dict.fromkeys(every)) or [None]


def chosen_devices(names: Sequence[str]) -> list[Device]:
    """The devices that `--target` means, each once. Raises OptionError for a name of none."""
    chosen: dict[str, Device] = {}
    for name in names:
        devices = devices_named(name)
        if not devices:
            near = nearest_devices(name)
            hint = (
                f"did you mean {' or '.join(near)}?" if near
                else f"choose from {', '.join(map(short_name, DEVICES))}"
            )  # fmt: skip
            raise OptionError(f"--target {name!r:.60} is unknown; {hint}")
        chosen |= {device.name: device for device in devices}
    return list(chosen.values())


def _manifest(
    what: str, draft_layer: int | None, max_length: int | None, batch: int, weights: str | None
) -> tuple[Manifest, int | None]:
    """Of a bundle; of a model, as a build would write it. And the most tokens that a sequence can have."""
    from ...runtime.bundle.folder import Bundle
    from ...runtime.bundle.manifest_file import MANIFEST
    from ..common.published_shapes import planned, published

    if (Path(what) / MANIFEST).is_file():
        if draft_layer is not None:
            raise OptionError("--draft-layer is for a model; a bundle has its drafts already")
        if weights is not None:
            raise OptionError(f"--weights {weights} is for a model; a bundle has its weights already")
        manifest = Bundle.open(what).manifest
        return manifest, manifest.limits.max_length
    if (known := published(what)) is not None:
        if weights is not None:
            known = _published_integers(known, weights)
        return planned(known, draft_layer, max_length, batch), known.max_positions
    need_extra("export", "`vlmexport fit MODEL`")
    from ..early_checks import check_build
    from ..pipeline.request import BuildRequest
    from .progress import tell_loading
    from .quiet import quiet_torch

    request = BuildRequest(
        model=what, output=Path("fit"), force=True, draft_layer=draft_layer, max_length=max_length, max_batch=max(16, batch),
        weights=weights,
    )  # fmt: skip
    check_build(request, write=False)
    tell_loading()
    with quiet_torch():
        from ..pipeline.export import export
        from ..pipeline.prepare import prepare

        prepared = prepare(request, write=False)
        export(prepared)
    return prepared.manifest, prepared.family.max_positions


def _published_integers(known: Shapes, weights: str) -> Shapes:
    """OptionError for what `build` would refuse, and for parts, whose sizes are not known."""
    from ..common.published_shapes import with_integers
    from ..quantization.choice import HEAD, check_no_states, parse_weights

    choice = parse_weights(weights)
    parts = [part for part, _ in choice.parts if part != HEAD]
    if parts:
        raise OptionError(
            f"--weights {choice}: of published models only the sizes of all layers and of the head are known, not of "
            f"{parts[0]}; name the kind of the layers, and {HEAD}=KIND"
        )
    if (dtype := choice.dtype_of("") or choice.dtype_of(HEAD)) is not None:
        check_no_states(known.manifest.decoder.linear_attention, dtype)
    if known.tied:
        choice.check_tied()
    return with_integers(known, choice.dtype_of(""), choice.dtype_of(HEAD), str(choice))


def show(devices: list[dict[str, Any]], manifest: Manifest, length: int, batch: int, out: Console) -> None:
    """Print the devices for people: a line for each."""
    from ...runtime.commands.output import size
    from ...runtime.commands.table import Table

    table = Table(
        f"{manifest.model.source}: {batch} × {length} tokens, plans of 16 bits; arithmetic, not measured"
    )
    table.add_column("device", whole=True)
    several = len({row["weights"] for row in devices}) > 1
    if several:
        table.add_column("weights", whole=True)
    table.add_column("needs", justify="right")
    table.add_column("has", justify="right", drop=2)
    table.add_column("fits", whole=True)
    table.add_column("left", justify="right")
    table.add_column("longest", justify="right")
    table.add_column("tokens/s, at most", justify="right")
    table.add_column(f"with {manifest.policy.draft or 'a draft'}", justify="right", drop=3)
    for row in devices:
        own = row["drafts"].get(manifest.policy.draft)
        table.add_row(
            short_name(row["device"]), *([row["weights"]] if several else []), size(row["needed"]["total"]), size(row["memory"]), "yes" if row["fits"] else "no",
            size(row["left"]) if row["fits"] else "", f"{row['longest']:,}" if row["longest"] else "–",
            rough(row["tokens_per_second"]), rough(own["tokens_per_second"]) if own else "",
        )  # fmt: skip
    out.print(table)
    needed = ", ".join(
        f"{part.replace('_', ' ')} {size(count)}"
        for part, count in devices[0]["needed"].items()
        if count and part != "total"
    )
    of = f" with {devices[0]['weights']} weights" if several else ""
    out.print(f"{devices[0]['title']}{of} needs: {needed}.", markup=False)
    out.print(
        f"longest: the --max-length that would fit with --batch {batch}. tokens/s: of one sequence, if reading weights and "
        f"cache at the memory's peak bandwidth were all there is; with a draft, {devices[0]['acceptance']:g} of whose tokens "
        "are accepted.",
        markup=False,
    )
    for line in software(devices):
        out.print(line, markup=False)


def rough(figure: float) -> str:
    """Two digits of a bound that no program reaches: 15930 → `16,000`, 4.73 → `4.7`."""
    rounded = float(f"{figure:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.2g}"


def software(devices: Sequence[dict[str, Any]]) -> list[str]:
    """Which software makes plans: what to type for a few devices, else a line for all that need the same."""
    devices = list({row["device"]: row for row in devices}.values())
    if not any(row["lowering"] for row in devices):
        return [f"{devices[0]['runs_with']}."]  # the model's, whatever the device
    if len(devices) <= 3:
        return [f"{row['title']}: {row['runs_with']}." for row in devices]
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for row in devices:
        alike.setdefault(tuple(row["lowering"].items()), []).append(short_name(row["device"]))
    return [
        f"{', '.join(names)}: " + ", ".join(f"{form} plans from {oldest} on" for form, oldest in forms) + "."
        for forms, names in alike.items()
    ]
