"""`vlmexport run`: one request, its text as it is produced, then one line of what speculation did."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import OptionError
from ..common.options import Files, Integer, Number, Switch, Text
from ..session.options import GenerateOptions, request_options
from .deprecated_flags import DeprecatedFlags
from .option_flags import with_flags
from .options import AsJson, EngineOptions
from .options import Bundle as BundleArgument

if TYPE_CHECKING:
    from ..bundle.folder import Check
    from ..session.session import Result
    from ..speedup.stats import Stats

SPECULATION = (
    'The line after the text says what speculation did. "4.1 tokens per pass" is tau: the accepted tokens and the one that '
    'verification adds; plain decoding has 1. "92 % of drafted accepted" is alpha: the accepted share of the drafted tokens '
    "that were judged; tokens after a wrong one are not judged."
)
"""Behind the options on the help page."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What the request is about."""

    image: Annotated[
        list[Path],
        Files(
            group="Input",
            metavar="FILE|DIR",
            help="Image file: JPEG, PNG, WebP, …; - reads standard input. A folder: one line for each of its pictures. Repeat "
            "for models that read several.",
        ),
    ] = field(default_factory=list)
    video: Annotated[
        list[Path],
        Files(
            group="Input",
            metavar="FILE|DIR",
            help="Video file (needs the extra [video]) or folder of pictures, for models that read videos. Repeat for "
            "several.",
        ),
    ] = field(default_factory=list)
    video_fps: Annotated[
        float | None,
        Number(
            group="Input",
            expert=True,
            metavar="FPS",
            help="Frames per second of --video DIR. A file knows its own.",
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Text(group="Input", metavar="TEXT", help="Prompt; - reads standard input. Default: the bundle's."),
    ] = None
    chat: Annotated[
        bool, Switch(group="Input", help="Read turn after turn from standard input, and answer each.")
    ] = False
    raw: Annotated[
        bool, Switch(group="Input", expert=True, help="Use the prompt as it is, without the chat template.")
    ] = False

    def check(self, as_json: bool) -> None:
        """Refuse what standard input cannot be at once. Raises `OptionError`."""
        pipes = [self.prompt, *map(str, self.image)].count("-")
        if self.chat and (self.raw or as_json or pipes):
            raise OptionError(
                "--chat reads turns from standard input and writes answers: leave --raw, --json and - out"
            )
        if pipes > 1:
            raise OptionError(
                "--image - and --prompt -: standard input holds one of them; give the other by name"
            )


@dataclass(frozen=True, kw_only=True)
class LoadOptions(EngineOptions):
    """How the bundle is loaded."""

    max_length: Annotated[
        int | None,
        Integer(
            low=1,
            group="Engine",
            expert=True,
            metavar="N",
            help="Positions to allocate for prompt and answer. Default: the bundle's.",
        ),
    ] = None
    check: Annotated[
        bool, Switch(group="Engine", expert=True, help="First compare every file with its checksum.")
    ] = False
    check_once: Annotated[
        bool,
        Switch(
            group="Engine",
            expert=True,
            help="Compare only files that changed since the last comparison, which your cache folder remembers.",
        ),
    ] = False

    @property
    def how(self) -> Check:
        """As `Bundle.open` has it."""
        return "sha256" if self.check else "once" if self.check_once else "size"


def run(
    bundle: BundleArgument,
    inputs: RunInputs,
    options: GenerateOptions,
    loading: LoadOptions,
    deprecated: DeprecatedFlags,
    as_json: AsJson = False,
) -> None:
    """Caption an image, or answer a question about it."""
    from ..bundle.folder import Bundle
    from ..families import get_family
    from ..families.base import views_of
    from ..families.plain import PlainText
    from ..images.quiet import quiet_stderr
    from ..session.session import Session
    from .chat import converse
    from .each import answer_each, first_readable, the_folder
    from .output import print_json
    from .requests import check_combinations, check_draft, read_media, read_prompt
    from .verbose import log_bundle, log_draft, log_request, log_result, log_session

    asked: dict[str, Any] = dict(options)
    deprecated.translate(asked)
    request_options(asked)
    check_combinations(options)
    inputs.check(as_json)
    image, video, chat = inputs.image, inputs.video, inputs.chat
    pictures = the_folder(image, alone=not (video or chat))
    begin = time.perf_counter()
    opened = Bundle.open(bundle, loading.how)
    log_bundle(opened, loading.how, time.perf_counter() - begin)
    opened = deprecated.with_verify_width(opened)
    text = read_prompt(inputs.prompt, inputs.raw)
    begin = time.perf_counter()
    known = None if pictures is None else first_readable(pictures)
    shown, media = (image, []) if known is None else ([], [known[1]])
    media += read_media(shown, video, inputs.video_fps if video or not chat else None)
    read = time.perf_counter() - begin
    family = get_family(opened.manifest.model.family)
    views = views_of(family, opened, media)
    if text is not None or not chat:
        # A request that cannot be served is refused before a large model is loaded for nothing.
        with quiet_stderr():  # where a tokenizer gives up, its library writes a page beside our line
            prepared = family.prepare(PlainText(opened) if asked.get("plain_text") else opened, views, text)
        log_request(prepared, media[: len(media) - len(video)], read)
    check_draft(opened.manifest, asked)
    log_draft(opened.manifest, asked)
    begin = time.perf_counter()
    with Session.load(
        opened, loading.device, loading.max_length, threads=loading.threads, kernel_cache=loading.kernel_cache
    ) as session:
        log_session(session, time.perf_counter() - begin)
        if chat:
            converse(session, text, views, asked, inputs.video_fps)
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
        print_json(report(result, str(bundle), inputs, text, note))
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    log_result(result)
    log.info(summary(result))
    if note is not None:
        log.info(note)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("run", epilog=SPECULATION)(with_flags(run))


def report(
    result: Result,
    bundle: str,
    inputs: RunInputs,
    prompt: str | None,
    note: str | None = None,
) -> dict[str, Any]:
    """The JSON of one request (schema: `schemas/run-1.json`)."""
    return {
        "schema_version": 1,
        "bundle": bundle,
        "image": _names(inputs.image),
        "video": _names(inputs.video),
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
