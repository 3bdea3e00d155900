"""`vlmexport profile`: times of every graph, from trtexec where there are plans, and what drafting would gain."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..common.errors import OptionError
from .option_flags import with_flags
from .options import AsJson, DeviceOptions
from .options import Bundle as BundleArgument
from .profile_options import PlanOptions, ProfiledEngine, ProfiledRequest

if TYPE_CHECKING:
    from rich.console import Console

    from ..bundle.folder import Bundle
    from ..measure.profile.host import Cycles
    from ..measure.profile.results import Timing

    TimeCycles = Callable[[str | None, int], Cycles | None]


log = logging.getLogger(__name__)

APPENDED = (
    "portable plans: appending the new rows to the caches, one copy after each pass, is not in these times"
)


def profile(
    bundle: BundleArgument,
    plans: PlanOptions,
    engine: ProfiledEngine,
    request: ProfiledRequest,
    as_json: AsJson = False,
) -> None:
    """Time every graph at every width with trtexec, or on the engine at hand, and predict what drafting gains."""
    from ..bundle.folder import Bundle
    from ..measure.profile.page import check_page, write_page
    from .output import console, print_json

    engine.check(plans)
    html, save_commands = request.html, plans.save_commands
    if html is not None:
        check_page(html)
    opened = Bundle.open(bundle)
    widths = _widths(engine.widths, opened)
    if save_commands is not None:
        count = _save(opened, plans, widths, save_commands)
        console().print(
            f"{save_commands}: {count} runs; then `vlmexport profile {bundle} --import DIR`", markup=False
        )
        return
    from ..measure.profile.report import build_report

    def reported(
        timings: list[Timing], about: dict[str, Any], embed: bool, cycles: TimeCycles | None = None
    ) -> dict[str, Any]:
        return build_report(
            opened.manifest, timings, {"model": opened.manifest.model.source, **about}, embed=embed, tokens=request.tokens,
            alpha=request.acceptance, cycles=cycles,
        )  # fmt: skip

    result = _by_trtexec(opened, plans, engine.engine or engine.device != "cpu", widths)
    report = (
        _measure_here(opened, widths, engine, result, reported, as_json)
        if isinstance(result, list)
        else reported(*result)
    )
    if as_json:
        print_json(report)
    else:
        show(report, console())
    if html is not None:  # behind what was measured: a page that cannot be written takes none of that away
        write_page(report, html)
        if not as_json:
            console().print(f"Page: {html}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("profile")(with_flags(profile))


def _widths(text: str | None, bundle: Bundle) -> list[int]:
    from ..measure.profile.points import verify_widths

    if text is None:
        return verify_widths(bundle)
    most = bundle.manifest.limits.max_width
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= most for part in parts):
        raise OptionError(
            f"--widths {text!r:.80}: numbers from 1 to {most}, the bundle's max_width, with commas between"
        )
    return sorted({1, *map(int, parts)})


def _save(bundle: Bundle, options: PlanOptions, widths: Sequence[int], path: Path) -> int:
    from ..common.atomic_files import write_file
    from ..measure.profile.commands import choose_plans, list_runs, script, write_inputs
    from ..measure.profile.points import list_points

    plans = _plans(choose_plans(bundle.manifest, options.target, options.backend))
    runs = list_runs(bundle.manifest, plans, list_points(bundle, widths))
    inputs = f"{path.stem}-inputs"
    write_inputs(runs, path.parent / inputs)
    write_file(path, script(runs, inputs, bundle.path))
    path.chmod(0o755)
    return len(runs)


def _plans(plans: list[dict[str, Any]]) -> list[dict[str, Any]]:

    if not plans:
        raise OptionError("the bundle has no TensorRT plans; `vlmexport compile` adds them")
    return plans


def _by_trtexec(
    bundle: Bundle, options: PlanOptions, engine: bool, widths: Sequence[int]
) -> tuple[list[Timing], dict[str, Any], bool] | list[str]:
    """Times, what the report says of where they come from, and whether embedding rows come from a graph; or, where the
    engine at hand is to be timed, notes that say why."""
    from ..measure.profile.commands import choose_plans, execute, find_tool, list_runs, read_results
    from ..measure.profile.points import list_points

    capacity = bundle.manifest.limits.max_length + bundle.manifest.limits.max_width
    import_results = options.import_results
    if not engine or import_results is not None:
        plans = choose_plans(bundle.manifest, options.target, options.backend)
        if import_results is not None or options.trtexec is not None:
            plans = _plans(plans)
        if plans:
            first = plans[0]
            named = f"{first['backend']} {first['version']} plans for {first['target']}, {first['precision']}"
            notes = [APPENDED] if any(plan.get("lowering") == "portable" for plan in plans) else []
            about = {"timed_with": named, "cache_rows": capacity, "notes": notes}
            if import_results is not None:
                return (
                    read_results(import_results),
                    {**about, "device": f"the device of {import_results}"},
                    True,
                )
            tool = find_tool(first["backend"], options.trtexec)
            if tool is not None:
                runs = list_runs(bundle.manifest, plans, list_points(bundle, widths))
                with tempfile.TemporaryDirectory(prefix="vlmexport-profile-") as folder:
                    timings = execute(runs, tool, bundle.path, Path(folder), options.iterations)
                return timings, {**about, "device": "this machine's GPU"}, True
            note = "trtexec was not found: these are times of the engine at hand, not of the plans"
            return [note]
    return []


def _measure_here(
    bundle: Bundle,
    widths: Sequence[int],
    options: DeviceOptions,
    notes: list[str],
    reported: Callable[[list[Timing], dict[str, Any], bool, TimeCycles], dict[str, Any]],
    as_json: bool,
) -> dict[str, Any]:
    """The report of the engine of a device."""
    from ..graphs.on_device import HOST_ROLES
    from ..hardware import machine
    from ..measure.profile.host import time_cycles
    from ..measure.profile.local import time_here
    from ..measure.profile.points import list_points
    from ..session.session import Session
    from .progress import showing

    points, cache_len = list_points(bundle, widths), bundle.manifest.limits.max_length // 2
    with Session.load(bundle, options.device, threads=options.threads) as session:
        engine = session.decoder.engine  # pyright: ignore[reportOptionalMemberAccess]
        if engine.host_memory:  # the decoder reads embedding rows from the table, and makes masks itself
            points = [point for point in points if point.graph not in HOST_ROLES]
        if not as_json:
            log.info("timing graphs on the engine %s: %d sizes, taking turns", engine.name, len(points))
        with showing(as_json) as progress:
            timings = time_here(
                session,
                points,
                cache_len,
                progress=lambda done, total: progress("timing graphs", done, total),
            )
        where = machine.describe()
        if machine.busy(where):
            notes = [*notes, machine.BUSY]
        about = {
            "timed_with": f"the engine {engine.name}", "cache_rows": cache_len, "notes": notes,
            "device": f"{where['cpu']}, {session.threads or 1} threads" if engine.host_memory else engine.machine,
        }  # fmt: skip
        return reported(
            timings, about, not engine.host_memory, lambda draft, length: time_cycles(session, draft, length)
        )


def show(report: dict[str, Any], out: Console) -> None:
    """Print a report for people."""
    from ..measure.profile.page import about_line, measured_line, warnings
    from .table import Table

    graphs = Table(f"{report['model']}: {about_line(report)}")
    graphs.add_column("graph", whole=True)
    graphs.add_column("profile")
    for name in ("width", "runs", "median ms", "95 %", "99 %"):
        graphs.add_column(name, justify="right")
    for row in report["graphs"]:
        ms = row["ms"]
        graphs.add_row(
            row["graph"], row["profile"], str(row["width"]), str(row["count"]), f"{ms['p50']:.3f}",
            f"{ms['p95']:.3f}", f"{ms['p99']:.3f}",
        )  # fmt: skip
    out.print(graphs)
    drafts = Table(f"{report['tokens_per_second']:.1f} tokens/s plain; with drafts, at the best length")
    drafts.add_column("acceptance", justify="right")
    for name in report["drafts"]:
        drafts.add_column(name, justify="right")
    for alpha in sorted({row["acceptance"] for row in report["predictions"]}):
        predictions = {row["draft"]: row for row in report["predictions"] if row["acceptance"] == alpha}
        drafts.add_row(
            f"{alpha:g}",
            *(
                f"{predictions[n]['speedup']:.2f} × at {predictions[n]['draft_length']}"
                for n in report["drafts"]
            ),
        )
    if report["drafts"]:
        out.print(drafts)
        out.print(measured_line(report), markup=False)
    costs = ", ".join(f"T({q}) {cost:.2f}" for q, cost in report["width_cost"].items() if q != "1")
    if costs:
        out.print(f"Width cost: {costs} × T(1)", markup=False)
    request = report["request"]
    every = sum(ms for ms in request["ms"].values() if ms)
    parts = ", ".join(f"{part} {100 * ms / every:.0f} %" for part, ms in request["ms"].items() if ms)
    where = (
        "in graphs, the host not counted" if request["ms"]["host"] is None else "in graphs and on the host"
    )
    how = f"{request['draft']} at {request['draft_length']}" if request["draft"] else "plain"
    out.print(
        f"A request of {request['tokens']} tokens ({how}, acceptance {request['acceptance']:g}): {every:.0f} ms {where}: {parts}",
        markup=False,
    )
    for line in warnings(report):
        out.print(line, markup=False)
