"""`vlmexport tune`: measure what drafts accept and what passes take, choose what pays, write it into the bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..runtime.bundle.combined_drafts import SIGN
from ..runtime.commands.option_flags import with_flags
from ..runtime.commands.options import AsJson, DeviceOptions
from ..runtime.commands.options import Bundle as BundleArgument
from ..runtime.common.options import Files, Integer, Number, Switch, Text, Texts
from ..runtime.speedup.predict import MIN_SPEEDUP
from ..runtime.tuning.survey import MINUTES
from .command_options import Inside
from .common import help_texts
from .common.processes import run_alone

if TYPE_CHECKING:
    from rich.console import Console

    from ..runtime.bundle.manifest import Manifest

LIMIT = 48
"""Requests that are decoded: what they accept differs from request to request, and half of them judge the choice."""


@dataclass(frozen=True, kw_only=True)
class TuneData:
    """What is decoded."""

    data: Annotated[
        list[str],
        Texts(
            group="Input",
            metavar="DATA",
            help=f"Requests as they will come: {help_texts.DATA}. Repeat for several. Default: what was observed before.",
        ),
    ] = field(default_factory=list)
    limit: Annotated[int, Integer(low=1, group="Input", metavar="N", help="Use the first N requests.")] = (
        LIMIT
    )
    prompt: Annotated[str, Text(group="Input", metavar="TEXT", help=help_texts.PROMPT)] = ""
    inside: Inside = None
    merge: Annotated[
        list[Path],
        Files(
            group="Input",
            metavar="FILE",
            help="Take over what other devices measured: what `tune --json` printed, or a copy of the bundle. Repeat for "
            "several.",
        ),
    ] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """How much is measured, and how the choice is made."""

    max_new_tokens: Annotated[
        int, Integer(low=2, group="Generation", metavar="N", help="Stop after this many tokens.")
    ] = 96
    repeats: Annotated[
        int,
        Integer(
            low=1,
            group="Generation",
            expert=True,
            metavar="N",
            help="Decode a short request N times in a row; the last time counts.",
        ),
    ] = 2
    minutes: Annotated[
        float,
        Number(
            group="Generation",
            metavar="M",
            help="Begin no further request after this time; at least two are decoded. A large model then uses fewer than "
            "--limit.",
        ),
    ] = MINUTES
    least: Annotated[
        float, Number(group="Speculation", metavar="X", help="Speculate from this predicted speed-up on.")
    ] = MIN_SPEEDUP
    by: Annotated[
        str,
        Text(
            group="Speculation",
            expert=True,
            metavar="speedup|reward",
            help="Choose by predicted speed-up, or by FastVLM's reward: C − weight × layer, with acceptance for C.",
        ),
    ] = "speedup"
    reward_weight: Annotated[
        float | None,
        Number(
            group="Speculation", expert=True, metavar="W", help="Weight for --by reward. Default: 1 / layers."
        ),
    ] = None
    dry_run: Annotated[bool, Switch(group="Output", help="Measure and choose, write nothing.")] = False


@with_flags
def tune(
    bundle: BundleArgument,
    requested: TuneData,
    how: TuneOptions,
    engine: DeviceOptions,
    as_json: AsJson = False,
) -> None:
    """Measure drafts and passes on this device, choose the draft, length and tree that pay, write them into the bundle.

    Every draft decodes the requests; what then looks best is decoded beside plain decoding. One half of the requests
    chooses, the other half says what to expect. Requests are decoded greedily. What drafts accept above temperature 0, by any --draft-sampling, is not measured.
    """
    from ..runtime.bundle.folder import Bundle
    from ..runtime.bundle.manifest_changes import check_writable, store_costs
    from ..runtime.commands.output import console, print_json
    from ..runtime.commands.progress import showing
    from ..runtime.common.errors import OptionError
    from ..runtime.session.session import Session
    from ..runtime.tuning.merging import merge_reports as merged
    from ..runtime.tuning.survey import calibrate as measure
    from ..runtime.tuning.survey import check_calibration

    run_alone("vlmexport tune")
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    if not how.dry_run:
        check_writable(opened.path)
    if requested.merge:
        if requested.data:
            raise OptionError("--merge takes over what was measured, --data measures: give one of them")
        costs, acceptance = merged(
            {str(path): _document(path) for path in requested.merge}, manifest.model.fingerprint
        )
        if not how.dry_run:
            store_costs(opened.path, costs, acceptance)
        if as_json:
            print_json({"schema_version": 1, "merged": {"costs": len(costs), "acceptance": len(acceptance)}})
        else:
            console().print(f"Merged {len(costs)} devices and {len(acceptance)} observations.", markup=False)
        return
    named = " ".join(requested.data) or None
    check_calibration(manifest, named, how.by)
    requests = read_requests(manifest, requested.data, requested.limit, requested.prompt, requested.inside)
    with Session.load(opened, engine.device, threads=engine.threads) as session, showing(as_json) as progress:
        report = measure(
            session, requests, named, minutes=how.minutes, max_new_tokens=how.max_new_tokens, repeats=how.repeats,
            least=how.least, by=how.by, reward_weight=how.reward_weight, progress=progress,
        )  # fmt: skip
    if not how.dry_run:
        store_costs(opened.path, [report["costs"]], report["acceptance"], anew=True)
    if as_json:
        print_json(report)
        return
    show(report, console())
    if not how.dry_run:
        console().print(f"Written into {opened.path / 'manifest.json'} for this machine", markup=False)


def show(report: dict[str, Any], out: Console) -> None:
    """Print the report for people."""
    from ..runtime.commands.table import Table
    from ..runtime.hardware.machine import BUSY, busy

    out.print(
        f"{report['model']}: {report['plain_tokens_per_second']:.1f} tokens/s plain; predicted here for greedy decoding, by "
        f"{'what was observed before' if report['data'] is None else report['data']}:\n",
        markup=False,
    )
    table = Table()
    for name in (
        "draft",
        "tokens drafted",
        "speed-up",
        "decoded beside plain",
        "tokens per cycle",
        "pays above",
    ):
        table.add_column(name, justify="left" if name == "draft" else "right", whole=True)
    for row in report["predictions"]:
        shape = (
            f"{row['nodes']}"
            if row["nodes"] == row["depth"]
            else f"tree of {row['nodes']}, {row['depth']} deep"
        )
        table.add_row(
            short_name(row["draft"]), shape, f"{row['speedup']:.2f} ×", "" if row["measured"] is None else f"{row['measured']:.2f} ×",
            f"{row['tokens_per_cycle']:.2f}", f"{row['break_even']:.2f}",
        )  # fmt: skip
    out.print(table)
    firsts = {row["draft"].partition(SIGN)[0] for row in report["predictions"] if SIGN in row["draft"]}
    for first in sorted(firsts):
        out.print(f"{_initials(first)}{SIGN}: {first}{SIGN}", style="dim", markup=False)
    choice = report["costs"]["choice"]
    if choice["draft"] is None:
        out.print(f"\nChosen: plain decoding; {_not_chosen(report)}", style="bold", markup=False)
    else:
        tree = "" if choice["draft_nodes"] is None else f", trees of {choice['draft_nodes']}"
        out.print(
            f"\nChosen: {choice['draft']}, {choice['draft_length']} deep{tree}{_expected(choice)}",
            style="bold",
            markup=False,
        )
    if report["uncertain"]:
        requests = report["requests"]["look"]
        out.print(
            f"Uncertain: {requests} request{'s' * (requests != 1)} say too little; give more (--limit, --minutes)",
            style="yellow",
        )
    if busy(report["machine"]):
        out.print(BUSY, style="yellow")


def short_name(draft: str) -> str:
    """A combination's name for a column of a table, where its second part is what tells it from others."""
    first, sign, second = draft.partition(SIGN)
    return f"{_initials(first)}{sign}{second}" if sign else draft


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("-"))


def _not_chosen(report: dict[str, Any]) -> str:
    """Why nothing was chosen: what came next, and whether that was seen or only predicted."""
    predictions = report["predictions"]
    needed = f"{report['least']:.2f} × is needed"
    if not predictions:
        return f"nothing is predicted, {needed}"
    best = max(predictions, key=lambda row: -1 if row["measured"] is None else row["measured"])
    reason = f"{best['draft']} was predicted {best['speedup']:.2f} ×"
    if best["measured"] is not None:
        reason += f", but decoded beside plain: {best['measured']:.2f} ×"
    return f"{reason}; {needed}"


def _expected(choice: dict[str, Any]) -> str:
    """The predicted speed-up in words; nothing where there is none."""
    if choice["speedup"] is None:
        return ""
    between = ""
    if choice["interval"] is not None:
        between = " [{:.2f} – {:.2f}]".format(*choice["interval"])
    return f"; {choice['speedup']:.2f} ×{between} expected"


def read_requests(
    manifest: Manifest, data: Sequence[str], limit: int, prompt: str = "", inside: Path | None = None
) -> list[dict[str, Any]]:
    """The records as requests, or, without data, those that `bench` makes up."""
    if not data:
        from ..runtime.commands.bench import make_requests

        return [
            {"image": made.image, "prompt": made.prompt} for made in make_requests(manifest, [], [], False)
        ]
    from ..runtime.common.errors import OptionError
    from .data import load_records
    from .data.layout import prompt_of

    records = load_records(data, False, prompt, limit, inside)
    if not len(records):
        raise OptionError(f"--data {' '.join(data)}: holds no request")
    requests: list[dict[str, Any]] = []
    for record in records:
        image = None if record.image is None else record.image.load()
        words = prompt_of(record, image, bool(manifest.text.chat_template), manifest.image is not None)
        requests.append({"image": image, "prompt": words or None})
    return requests


def _document(path: Path) -> dict[str, Any]:
    """A report of another device, or the manifest of a bundle. Raises `OptionError`."""
    from ..runtime.bundle.manifest_file import MANIFEST, read_manifest
    from ..runtime.common.errors import BundleError, OptionError

    if not path.exists():
        raise OptionError(
            f"--merge {path}: does not exist; give a report of `vlmexport tune --json`, or a bundle"
        )
    try:
        document = read_manifest(path / MANIFEST if path.is_dir() else path)
    except BundleError as error:
        reason = error.__cause__ or error
        raise OptionError(
            f"--merge {path}: no report of `vlmexport tune --json`, and no bundle ({reason})"
        ) from None
    if not isinstance(document, dict):
        raise OptionError(f"--merge {path}: holds no report of `vlmexport tune --json`, and no manifest")
    return document
