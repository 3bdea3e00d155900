"""`vlmexport bench`: plain against speculative decoding, a table, and a plot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import OptionError
from ..common.options import File, Files, Integer, Switch, Texts, declared_options
from ..session.options import GenerateOptions
from ..session.request_options import request_options
from .deprecated_flags import DeprecatedBenchFlags, warn
from .option_flags import with_flags
from .options import Bundle as BundleArgument
from .options import EngineOptions

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest
    from ..measure.benchmark import Request


WORDS = (
    "alpha: accepted share of the drafted tokens that were judged. tau: tokens per cycle, with the one that verification adds. "
    "bound: the speed-up that the times of the graphs alone allow at that tau. A repeat decodes plainly, then with the draft: "
    "one pair. The speed-up is the median of the pairs' quotients."
)
"""Behind the options on the help page."""


@dataclass(frozen=True, kw_only=True)
class BenchRequests:
    """What is decoded: every image with every prompt."""

    image: Annotated[
        list[Path],
        Files(group="Input", metavar="FILE", help="Image file. Repeat for several. Default: a made-up one."),
    ] = field(default_factory=list)
    prompt: Annotated[
        list[str],
        Texts(group="Input", metavar="TEXT", help="Prompt. Repeat for several. Default: the bundle's."),
    ] = field(default_factory=list)
    raw: Annotated[
        bool, Switch(group="Input", expert=True, help="Use prompts as they are, without the chat template.")
    ] = False
    repeats: Annotated[
        int, Integer(low=1, group="Generation", metavar="N", help="Measurements of each arm, interleaved.")
    ] = 5


@dataclass(frozen=True, kw_only=True)
class BenchOutput:
    """Where the report goes."""

    plot: Annotated[
        Path | None, File(group="Output", metavar="FILE", help="Write a plot: .png, .svg or .pdf.")
    ] = None
    save: Annotated[
        bool,
        Switch(
            group="Output", help="Time every draft's passes and store them in the bundle for this machine."
        ),
    ] = False
    report: Annotated[
        Path | None,
        File(group="Output", expert=True, metavar="FILE", help="Write what --json prints into a file."),
    ] = None
    json: Annotated[bool, Switch(group="Output", help="Print one JSON object on stdout.")] = False

    def check(self) -> None:
        """Raises `OptionError` for a file that cannot be written."""
        from ..common.atomic_files import check_folder
        from .plot import check_plot

        if self.plot is not None:
            check_plot(self.plot)
        if self.report is not None:
            check_folder("--report", self.report)

    def write(self, report: dict[str, Any], bundle: Path) -> None:
        """Print the report, and write what was asked for."""
        from ..common.atomic_files import write_file
        from .bench_report import show
        from .output import as_text, console, print_json
        from .plot import write_plot

        if self.json:
            print_json(report)
        else:
            show(report, console())
            if self.save:
                console().print(
                    f"Stored the pass times of this machine in {bundle / 'manifest.json'}", markup=False
                )
        # Behind what was measured: a file that cannot be written takes none of that away.
        if self.report is not None:
            write_file(self.report, as_text(report))
        if self.plot is not None:
            write_plot(report, self.plot)
            if not self.json:
                console().print(f"Plot: {self.plot}", markup=False)


def bench(
    bundle: BundleArgument,
    requested: BenchRequests,
    options: GenerateOptions,
    engine: EngineOptions,
    deprecated: DeprecatedBenchFlags,
    output: BenchOutput,
) -> None:
    """Measure plain against speculative decoding, with the bound that the graphs allow."""
    from ..bundle.folder import Bundle
    from ..bundle.manifest_changes import check_writable, store_costs
    from ..families import get_family
    from ..measure.benchmark import measure
    from ..measure.forced_acceptance import forced_acceptance
    from ..session.session import Session
    from .progress import showing
    from .requests import check_combinations, check_draft
    from .verbose import log_bundle, log_draft, log_request, log_session

    if options.get("draft") == "none":
        raise OptionError("--draft none: bench compares a draft with plain decoding; name a draft")
    check_combinations(options)
    generate_kwargs: dict[str, Any] = {"seed": 0, **options} if options.get("temperature") else dict(options)
    deprecated.translate(generate_kwargs)
    request_options(generate_kwargs)
    if deprecated.force_acceptance is not None:
        warn("--force-acceptance", "use vlmexport.runtime.measure.forced_acceptance")
    output.check()
    begin = time.perf_counter()
    opened = Bundle.open(bundle)
    log_bundle(opened, "size", time.perf_counter() - begin)
    opened = deprecated.with_verify_width(opened)
    if output.save:
        check_writable(opened.path)
    requests = make_requests(opened.manifest, requested.image, requested.prompt, requested.raw)
    for request in requests:  # refused before a large model is loaded for nothing
        prepared = get_family(opened.manifest.model.family).prepare(opened, request.image, request.prompt)
        log_request(prepared)
    check_draft(opened.manifest, generate_kwargs)
    log_draft(opened.manifest, generate_kwargs)
    of_drafts, shared = of_arms(generate_kwargs)
    begin = time.perf_counter()
    with (
        Session.load(
            opened,
            engine.device,
            threads=engine.threads,
            kernel_cache=engine.kernel_cache,
            picture_cache=0,  # a repeat is a whole request
        ) as session,
        showing(output.json) as progress,
        forced_acceptance(session, deprecated.force_acceptance),
    ):
        log_session(session, time.perf_counter() - begin)
        report = measure(
            session, requests, options=of_drafts, shared=shared,
            repeats=requested.repeats, every_draft=output.save, progress=progress,
        )  # fmt: skip
    if output.save:
        store_costs(opened.path, [report["costs"]])
    output.write(report, opened.path)


def of_arms(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the speculative arm alone, those of both arms)."""
    declared = declared_options(GenerateOptions)
    of_drafts = {
        name: value
        for name, value in options.items()
        if name not in declared or declared[name].group == "Speculation"
    }
    return of_drafts, {name: value for name, value in options.items() if name not in of_drafts}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    flags = with_flags(
        bench, {"max_new_tokens": {"default": 96}}, without=("deadline", "plain_text", "similar", "stop")
    )
    app.command("bench", epilog=WORDS)(flags)


def make_requests(manifest: Manifest, images: list[Path], prompts: Sequence[str], raw: bool) -> list[Request]:
    """Every image with every prompt. Without an image a synthetic one, without a prompt the bundle's default."""
    from ..images.synthetic import synthetic_image
    from ..measure.benchmark import DEFAULT_PROMPT, Request
    from .requests import read_picture, read_prompt

    texts: list[str | None] = [read_prompt(text, raw) for text in prompts] or [None]
    if manifest.image is None:
        if not prompts and manifest.text.default_prompt is None:
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
