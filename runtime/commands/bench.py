"""`vlmexport bench`: plain against speculative decoding, a table, and a plot."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..common.validation import TYPICAL_DELTA, TYPICAL_EPSILON
from . import options

if TYPE_CHECKING:
    from rich.console import Console

    from ..bundle.manifest import Manifest
    from ..measure.benchmark import Request


WORDS = (
    "alpha: accepted of the drafted tokens that were judged; tau: tokens per cycle, the one that verification gives itself "
    "included; bound: what the times of the graphs alone allow at that tau. A repeat decodes plainly, then with the draft: one "
    "pair. The speed-up is the median of the pairs' quotients."
)
"""Behind the options on the help page."""


def bench(
    bundle: options.Bundle,
    image: list[Path] = typer.Option([], "--image", help="Image file; repeat for several. Default: a made-up one."),
    prompt: list[str] = typer.Option([], "--prompt", help="Prompt; repeat for several. Default: the bundle's."),
    raw: bool = typer.Option(False, "--raw", help="Use prompts as they are, without the chat template."),
    max_new_tokens: int = typer.Option(96, "--max-new-tokens", min=2, help="Stop after this many tokens."),
    repeats: int = typer.Option(5, "--repeats", min=1, help="Measurements of each arm, interleaved."),
    draft: str = typer.Option(None, "--draft", metavar="KIND", help="Draft to use. Default: the bundle's."),
    draft_length: options.DraftLength = None,
    draft_nodes: options.DraftNodes = None,
    confidence_threshold: options.ConfidenceThreshold = None,
    adaptive: options.Adaptive = None,
    force_acceptance: float = typer.Option(
        None, "--force-acceptance", metavar="A", min=0.0, max=1.0,
        help="Accept drafts with this probability, for models with random weights: their output is no text.",
    ),
    temperature: options.Temperature = 0.0,
    seed: int = typer.Option(None, "--seed", min=0, help="Seed of sampling, for both arms. Default: 0."),
    draft_sampling: options.DraftSampling = None,
    lossy: options.Lossy = None,
    typical_epsilon: options.TypicalEpsilon = TYPICAL_EPSILON,
    typical_delta: options.TypicalDelta = TYPICAL_DELTA,
    device: options.Device = "cpu",
    kernel_cache: options.KernelCache = None,
    verify_width: options.VerifyWidth = None,
    threads: options.Threads = None,
    plot: Path = typer.Option(None, "--plot", metavar="FILE", help="Write a plot: .png, .svg or .pdf."),
    save: bool = typer.Option(False, "--save", help="Time every draft's passes and store them in the bundle for this machine."),
    report_file: Path = typer.Option(None, "--report", metavar="FILE", help="Write what --json prints into a file."),
    as_json: options.AsJson = False,
) -> None:  # fmt: skip
    """Measure plain against speculative decoding, with the bound that the graphs allow."""
    from ..bundle.folder import Bundle
    from ..bundle.manifest_changes import check_writable, store_costs
    from ..common.atomic_files import check_folder, write_file
    from ..common.errors import OptionError
    from ..families import get_family
    from ..measure.benchmark import measure
    from ..session.request import request_options
    from ..session.session import Session
    from .output import as_text, console, print_json
    from .plot import check_plot, write_plot
    from .progress import showing
    from .requests import check_lossy, draft_options, tell_idle
    from .verbose import log_bundle, log_draft, log_request, log_session

    if draft == "none":
        raise OptionError("--draft none: bench compares a draft with plain decoding; name a draft")
    tell_idle(temperature, {"--seed": seed})
    sampling = {"temperature": temperature, "seed": seed or 0} if temperature else {}
    accepting: dict[str, Any] = {}
    if lossy is not None:
        accepting = {"lossy": lossy, "typical_epsilon": typical_epsilon, "typical_delta": typical_delta}
    if draft_sampling is not None:
        accepting["draft_sampling"] = draft_sampling
    stopping = {"confidence_threshold": confidence_threshold, "adaptive": adaptive}
    accepting |= {name: value for name, value in stopping.items() if value is not None}
    request_options({**sampling, **accepting, "force_acceptance": force_acceptance})
    check_lossy(lossy, temperature, typical_epsilon, typical_delta)
    if plot is not None:
        check_plot(plot)
    if report_file is not None:
        check_folder("--report", report_file)
    begin = time.perf_counter()
    opened = Bundle.open(bundle)
    log_bundle(opened, "size", time.perf_counter() - begin)
    if verify_width is not None:
        opened = opened.with_verify_width(verify_width)
    if save:
        check_writable(opened.path)
    requests = make_requests(opened.manifest, image, prompt, raw)
    for request in requests:  # refused before a large model is loaded for nothing
        prepared = get_family(opened.manifest.model.family).prepare(opened, request.image, request.prompt)
        log_request(prepared)
    asked = draft_options(opened.manifest, draft, draft_length, draft_nodes)
    log_draft(opened.manifest, asked)
    begin = time.perf_counter()
    with (
        Session.load(opened, device, threads=threads, kernel_cache=kernel_cache) as session,
        showing(as_json) as progress,
    ):
        log_session(session, time.perf_counter() - begin)
        report = measure(
            session,
            requests,
            options=asked | accepting,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            force_acceptance=force_acceptance,
            every_draft=save,
            progress=progress,
        )
    if save:
        store_costs(opened.path, [report["costs"]])
    if as_json:
        print_json(report)
    else:
        show(report, console())
        if save:
            console().print(
                f"Stored the pass times of this machine in {opened.path / 'manifest.json'}", markup=False
            )
    # Behind what was measured: a file that cannot be written takes none of that away.
    if report_file is not None:
        write_file(report_file, as_text(report))
    if plot is not None:
        write_plot(report, plot)
        if not as_json:
            console().print(f"Plot: {plot}", markup=False)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("bench", epilog=WORDS)(bench)


def make_requests(manifest: Manifest, images: list[Path], prompts: list[str], raw: bool) -> list[Request]:
    """Every image with every prompt. Without an image a synthetic one, without a prompt the bundle's default."""
    from ..images.synthetic import synthetic_image
    from ..measure.benchmark import DEFAULT_PROMPT, Request
    from .requests import read_picture, read_prompt

    texts: list[str | None] = [read_prompt(text, raw) for text in prompts] or [None]
    if manifest.image is None:
        if prompts == [] and manifest.text.default_prompt is None:
            texts = [read_prompt(DEFAULT_PROMPT, raw)]
        pictures: list[tuple[str, Any]] = [(path.name, read_picture(path)) for path in images] or [("", None)]
    else:
        # A model that takes any size is given one of the usual side.
        sides = (max(side or 224, 64) for side in (manifest.image.height, manifest.image.width))
        made_up = synthetic_image(*sides)
        pictures = [(path.name, read_picture(path)) for path in images] or [("made-up image", made_up)]
    return [
        Request(
            name=", ".join(part for part in (name, text or "") if part) or "default prompt",
            image=picture,
            prompt=text,
        )
        for name, picture in pictures
        for text in texts
    ]


def show(report: dict[str, Any], out: Console) -> None:
    """Print the report for people."""
    from ..hardware.machine import BUSY, busy
    from ..measure.headline import headline
    from .table import Table

    plain, speculative, speedup = report["plain"], report["speculative"], report["speedup"]
    draft = report["draft"]
    trained = "" if draft["trained"] else " (untrained)"
    count, tokens = len(report["requests"]), sum(request["tokens"] for request in report["requests"])
    out.print(
        f"{report['model']}, {report['precision']}: draft {draft['name']}{trained}, {report['draft_length'] or 'adaptive'} "
        f"tokens per cycle; {count} request{'s' * (count > 1)}, {tokens} tokens, "
        f"{report['repeats']} interleaved repeats",
        markup=False,
    )
    out.print("" if report["note"] is None else f"{report['note']}\n", markup=False)
    table = Table()
    table.add_column("")
    for name in ("tokens/s", "min – max", "first token", "whole request"):
        table.add_column(name, justify="right")
    drafted = "speculative" if report["lossy"] is None else f"{report['lossy']}, LOSSY"
    for name, arm in (("plain", plain), (drafted, speculative)):
        table.add_row(
            name,
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['tokens_per_second_min']:.1f} – {arm['tokens_per_second_max']:.1f}",
            f"{1e3 * arm['seconds_to_first_token'] / count:.1f} ms",
            f"{1e3 * arm['seconds'] / count:.1f} ms",
        )
    out.print(table)
    out.print(
        f"\nDecoding      {headline(report)}; {speedup['end_to_end']:.2f} times with image and prompt",
        style="bold",
    )
    out.print(_acceptance(report))
    bound = report["bound"]
    if bound is not None:
        out.print(
            f"Bound         {bound['decode']:.2f} ×: {bound['tokens_per_cycle']:.2f} tokens per cycle of "
            f"{1e3 * bound['cycle_seconds']:.2f} ms, against {1e3 * bound['token_seconds']:.2f} ms per token; "
            f"achieved {100 * report['achieved']:.0f} %"
        )
    inside = report["inside_engine"]
    if inside is not None:
        out.print(
            f"Host          {100 * plain['host_share']:.1f} % of plain decoding, {100 * speculative['host_share']:.1f} % "
            f"of speculative; inside the engine {inside:.2f} ×, achieved {100 * speedup['decode'] / inside:.0f} %",
            highlight=False,
        )
    if report["predicted"] is not None:
        share = speedup["decode"] / report["predicted"]
        out.print(
            f"Predicted     {report['predicted']:.2f} × by `vlmexport calibrate`; measured {100 * share:.0f} % of it"
        )
    elif report["unpredicted"] is not None:
        out.print(f"Predicted     nothing: {report['unpredicted']}", markup=False)
    widths = ", ".join(
        f"T({width}) {cost:.2f}" for width, cost in report["width_cost"].items() if width != "1"
    )
    out.print(f"Width cost    {widths} × T(1)", highlight=False)
    machine = report["machine"]
    load = "" if machine["load"] is None else f", load {machine['load']:.1f}"
    out.print(
        f"Machine       {machine['cpu']}, {machine['cores']} cores{load}, {machine['system']}", markup=False
    )
    if busy(machine):
        out.print(BUSY, style="yellow")
    if report["lossy"] is not None:
        out.print(
            f"Output        LOSSY ({report['lossy']} acceptance): not distributed as the model's; the speed-up is not that of "
            "lossless decoding",
            style="bold yellow",
        )
    elif report["identical"] is None and report["output_is_text"]:
        out.print("Output        distributed as the model's; another draw than plain decoding's")
    elif report["identical"] is None:
        pass
    elif report["identical"]:
        out.print("Output        identical to plain decoding, token for token", style="green")
    else:
        out.print("Output        NOT identical to plain decoding", style="bold red")
    if not report["output_is_text"]:
        out.print(
            f"Acceptance was forced to {report['forced_acceptance']:g}: drafts were accepted whatever "
            "they were. The output is not text, and the figures say nothing about a trained draft.",
            style="yellow",
        )


def _acceptance(report: dict[str, Any]) -> str:
    if report["alpha"] is None:
        return "Acceptance    nothing was drafted"
    depths = " ".join(f"{alpha:.2f}" for alpha in report["alpha_by_depth"])
    return f"Acceptance    alpha {report['alpha']:.2f}, tau {report['tau']:.2f} tokens per cycle; by depth {depths}"
