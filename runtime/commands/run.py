"""`vlmexport run`: one request, its text as it is produced, then one line of what speculation did."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.options import Integer, Switch
from ..session.options import GenerateOptions
from ..session.request_options import request_options
from .deprecated_flags import DeprecatedFlags
from .option_flags import with_flags
from .options import AsJson, EngineOptions
from .options import Bundle as BundleArgument
from .run_report import RunInputs, report, summary

if TYPE_CHECKING:
    from ..bundle.folder import Check

SPECULATION = (
    'The line after the text says what speculation did. "4.1 tokens per pass" is tau: the accepted tokens and the one that '
    'verification adds; plain decoding has 1. "92 % of drafted accepted" is alpha: the accepted share of the drafted tokens '
    "that were judged; tokens after a wrong one are not judged."
)
"""Behind the options on the help page."""

log = logging.getLogger(__name__)


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
    from .memory_file import opened_memory, save_memory
    from .output import print_json
    from .requests import check_combinations, check_draft, read_media, read_prompt
    from .schema_file import read_schema, warn_if_cut
    from .verbose import log_bundle, log_draft, log_request, log_result, log_session

    generate_kwargs: dict[str, Any] = dict(options)
    deprecated.translate(generate_kwargs)
    if (schema := read_schema(inputs.schema)) is not None:
        generate_kwargs["schema"] = schema
    request_options(generate_kwargs)
    check_combinations(options)
    inputs.check(as_json)
    memory = opened_memory(inputs.memory)
    if memory is not None:
        generate_kwargs["memory"] = memory
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
            prepared = family.prepare(
                PlainText(opened) if generate_kwargs.get("plain_text") else opened, views, text
            )
        log_request(prepared, media[: len(media) - len(video)], read)
    check_draft(opened.manifest, generate_kwargs)
    log_draft(opened.manifest, generate_kwargs)
    begin = time.perf_counter()
    with (
        contextlib.ExitStack() as stack,
        Session.load(
            opened,
            loading.device,
            loading.max_length,
            threads=loading.threads,
            kernel_cache=loading.kernel_cache,
        ) as session,
    ):
        log_session(session, time.perf_counter() - begin)
        stack.callback(save_memory, memory, inputs.memory)
        if chat:
            converse(session, text, views, generate_kwargs, inputs.video_fps)
            return
        if pictures is not None and known is not None:
            answer_each(session, pictures, text, generate_kwargs, str(bundle) if as_json else None, known)
            return
        stream = session.stream(image=views, prompt=text, **generate_kwargs)
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
    warn_if_cut(result)
    if note is not None:
        log.info(note)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("run", epilog=SPECULATION)(with_flags(run))
