"""`vlmexport run`: one request, its text as it is produced, then one line of what speculation did."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..common.validation import TYPICAL_DELTA, TYPICAL_EPSILON
from . import options

if TYPE_CHECKING:
    from ..session.session import Result
    from ..speedup.stats import Stats

SPECULATION = (
    'What speculation did stands in one line behind the text: "4.1 tokens per pass" (tau: the accepted tokens and the one '
    'that verification gives itself; plain decoding has 1), "92 % of drafted accepted" (alpha: of the drafted tokens that '
    "were judged; those behind a wrong one are not)."
)
"""Behind the options on the help page."""

log = logging.getLogger(__name__)


def run(
    bundle: options.Bundle,
    image: list[Path] = typer.Option(
        [],
        "--image",
        metavar="FILE|DIR",
        help="Image file: JPEG, PNG, WebP, …; - reads standard input; a folder: a line for each of its pictures. Repeat for "
        "several, where the model reads several.",
    ),
    video: list[Path] = typer.Option(
        [],
        "--video",
        metavar="FILE|DIR",
        help="Video file (needs the extra [video]) or folder of pictures, where the model reads videos. Repeat for several.",
    ),
    video_fps: float = typer.Option(
        None, "--video-fps", metavar="FPS", help="Frames per second of --video DIR; a file knows its own."
    ),
    prompt: str = typer.Option(
        None, "--prompt", help="Prompt; - reads standard input. Default: the bundle's."
    ),
    chat: bool = typer.Option(
        False, "--chat", help="Go on: read turn after turn from standard input, and answer each."
    ),
    raw: bool = typer.Option(False, "--raw", help="Use the prompt as it is, without the chat template."),
    plain_text: bool = typer.Option(
        False, "--plain-text", help="Read what is typed as text only: special tokens in it are none."
    ),
    max_new_tokens: int = typer.Option(128, "--max-new-tokens", min=1, help="Stop after this many tokens."),
    draft: str = typer.Option(
        None,
        "--draft",
        metavar="KIND|none",
        help="Draft to use; none decodes plainly, prompt-lookup+KIND asks KIND where nothing stood before.",
    ),
    draft_length: options.DraftLength = None,
    draft_nodes: options.DraftNodes = None,
    confidence_threshold: options.ConfidenceThreshold = None,
    adaptive: options.Adaptive = None,
    temperature: options.Temperature = 0.0,
    top_k: int = typer.Option(0, "--top-k", min=0, help="Sample among the K likeliest tokens; 0: all."),
    top_p: float = typer.Option(
        1.0, "--top-p", max=1.0, help="Sample among the likeliest tokens that make up this probability."
    ),
    min_p: float = typer.Option(
        0.0,
        "--min-p",
        min=0.0,
        max=1.0,
        help="Sample among tokens that are at least this part as likely as the likeliest.",
    ),
    repetition_penalty: float = typer.Option(
        None, "--repetition-penalty", metavar="X", help="In place of the model's own; 1 is none."
    ),
    draft_sampling: options.DraftSampling = None,
    lossy: options.Lossy = None,
    typical_epsilon: options.TypicalEpsilon = TYPICAL_EPSILON,
    typical_delta: options.TypicalDelta = TYPICAL_DELTA,
    seed: int = typer.Option(None, "--seed", help="Seed of sampling; the same seed gives the same text."),
    stop: list[str] = typer.Option(
        [], "--stop", metavar="TEXT", help="End before this text; repeat for several."
    ),
    deadline: float = typer.Option(None, "--deadline", metavar="SECONDS", help="End after this time."),
    max_length: int = typer.Option(
        None, "--max-length", min=1, help="Positions of prompt and answer to allocate. Default: the bundle's."
    ),
    device: options.Device = "cpu",
    threads: options.Threads = None,
    kernel_cache: options.KernelCache = None,
    verify_width: options.VerifyWidth = None,
    check: bool = typer.Option(False, "--check", help="First compare every file with its checksum."),
    check_once: bool = typer.Option(
        False,
        "--check-once",
        help="The same, for files that changed since the last time: kept in your cache folder.",
    ),
    as_json: options.AsJson = False,
) -> None:
    """Caption an image, or answer a question about it."""
    from ..bundle.folder import Bundle
    from ..common.errors import OptionError
    from ..families import get_family
    from ..families.base import views_of
    from ..families.plain import PlainText
    from ..images.quiet import quiet_stderr
    from ..sampling.sampler import Sampling
    from ..session.request import request_options
    from ..session.session import Session
    from .chat import converse
    from .each import answer_each, first_readable, the_folder
    from .output import print_json
    from .requests import check_lossy, check_plain, draft_options, read_media, read_prompt, tell_idle
    from .verbose import log_bundle, log_draft, log_request, log_result, log_session

    asked: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed,
        "min_p": min_p, "repetition_penalty": repetition_penalty, "draft_sampling": draft_sampling, "lossy": lossy, "typical_epsilon": typical_epsilon,
        "typical_delta": typical_delta, "stop": stop, "deadline": deadline, "confidence_threshold": confidence_threshold,
        "adaptive": adaptive, "plain_text": plain_text,
    }  # fmt: skip
    request_options(asked)
    Sampling(temperature, top_k, top_p, 0 if seed is None else seed, min_p)
    check_lossy(lossy, temperature, typical_epsilon, typical_delta)
    tell_idle(
        temperature,
        {
            "--top-k": top_k or None,
            "--top-p": top_p if top_p != 1 else None,
            "--min-p": min_p or None,
            "--seed": seed,
        },
    )
    check_plain(
        draft,
        {
            "--draft-length": draft_length, "--draft-nodes": draft_nodes, "--adaptive": adaptive,
            "--confidence-threshold": confidence_threshold,
        },
    )  # fmt: skip
    if chat and (raw or as_json or "-" in (prompt, *map(str, image))):
        raise OptionError(
            "--chat reads turns from standard input and writes answers: leave --raw, --json and - out"
        )
    if [prompt, *map(str, image)].count("-") > 1:
        raise OptionError(
            "--image - and --prompt -: standard input holds one of them; give the other by name"
        )
    pictures = the_folder(image, alone=not (video or chat))
    begin, how = time.perf_counter(), "sha256" if check else "once" if check_once else "size"
    opened = Bundle.open(bundle, how)
    log_bundle(opened, how, time.perf_counter() - begin)
    if verify_width is not None:
        opened = opened.with_verify_width(verify_width)
    text = read_prompt(prompt, raw)
    begin = time.perf_counter()
    known = None if pictures is None else first_readable(pictures)
    shown, media = (image, []) if known is None else ([], [known[1]])
    media += read_media(shown, video, video_fps if video or not chat else None)
    read = time.perf_counter() - begin
    family = get_family(opened.manifest.model.family)
    views = views_of(family, opened, media)
    if text is not None or not chat:
        # A request that cannot be served is refused before a large model is loaded for nothing.
        with quiet_stderr():  # where a tokenizer gives up, its library writes a page beside our line
            prepared = family.prepare(PlainText(opened) if plain_text else opened, views, text)
        log_request(prepared, media[: len(media) - len(video)], read)
    asked |= draft_options(opened.manifest, draft, draft_length, draft_nodes)
    log_draft(opened.manifest, asked)
    begin = time.perf_counter()
    with Session.load(
        opened, device, threads=threads, max_length=max_length, kernel_cache=kernel_cache
    ) as session:
        log_session(session, time.perf_counter() - begin)
        if chat:
            converse(session, text, views, asked, video_fps)
            return
        if pictures is not None and known is not None:
            answer_each(session, pictures, text, asked, str(bundle) if as_json else None, known)
            return
        stream = session.stream(image=views, prompt=text, **asked)
        for piece in stream:
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        result, note = stream.result, session.note
    if as_json:
        log_result(result)
        print_json(report(result, str(bundle), image, video, text, note))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    log_result(result)
    log.info(summary(result))
    if note is not None:
        log.info(note)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("run", epilog=SPECULATION)(run)


def report(
    result: Result,
    bundle: str,
    image: list[Path],
    video: list[Path],
    prompt: str | None,
    note: str | None = None,
) -> dict[str, Any]:
    """The JSON of one request (schema: `schemas/run-1.json`)."""
    return {
        "schema_version": 1,
        "bundle": bundle,
        "image": _names(image),
        "video": _names(video),
        "prompt": prompt,
        "note": note,
        **result.to_dict(),
    }


def _names(paths: list[Path]) -> str | list[str] | None:
    return [str(path) for path in paths] if len(paths) > 1 else str(paths[0]) if paths else None


def stats_line(stats: Stats) -> str:
    """What drafting did, in the words of `SPECULATION`."""
    judged = (
        "none of the drafted judged"
        if stats.alpha is None
        else f"{100 * stats.alpha:.0f} % of drafted accepted"
    )
    return f"{stats.tau:.1f} tokens per pass, {judged}"


def summary(result: Result) -> str:
    """One line: tokens, speed, and what speculation did."""
    stats = result.stats
    kept = (
        f", {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens kept" if stats.reused_tokens else ""
    )
    rate = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s"
    line = f"{len(result.tokens)} tokens{rate} ({result.finish_reason}){kept}"
    if not stats.proposed:
        return f"{line}; plain decoding"
    length = "as many tokens a pass as pay"
    if stats.draft_length is not None:
        length = f"{stats.draft_length} tokens a pass"
    line += f"; {stats_line(stats)}; draft {stats.draft}, {length}"
    return line if result.lossy is None else f"{line}; LOSSY ({result.lossy} acceptance)"
