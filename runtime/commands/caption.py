"""`vlmexport caption`: a caption for every picture of a large set, into Parquet."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import OptionError
from ..common.optional_deps import need_extra
from ..common.options import Custom, File, Integer, Text
from ..common.parts import METAVAR, Part, read_part
from ..session.options import GenerateOptions
from ..session.request_options import request_options
from .option_flags import with_flags
from .options import AsJson, PromptText, RawPrompt, RayAddress, SchemaFile
from .options import Bundle as BundleArgument
from .run import LoadOptions

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..captioning.index import Index
    from ..captioning.run import Captioned

MAX_BATCH = 16
"""Pictures decoded together by default, where the bundle allows so many."""

log = logging.getLogger(__name__)

Inputs = Annotated[
    list[Path],
    typer.Argument(
        metavar="INPUT…",
        help="Picture files, folders (with the folders in them), and Parquet tables (FILE.parquet).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class CaptionInputs:
    """What is asked about every picture, and where tables have the pictures."""

    prompt: PromptText = None
    schema: SchemaFile = None
    raw: RawPrompt = False
    image_column: Annotated[
        str,
        Text(
            group="Input", metavar="NAME",
            help="Column of a table with the pictures: paths, encoded bytes, or structs of both (bytes, path).",
        ),
    ] = "image"  # fmt: skip
    key_column: Annotated[
        str | None,
        Text(
            group="Input", metavar="NAME",
            help="Column of a table that names its pictures in the output. Default: their paths, or the numbers of their rows.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CaptionOutput:
    """Where captions go."""

    out: Annotated[
        Path,
        File(
            flag="-o --out",
            group="Output",
            metavar="FILE.parquet|DIR",
            help="One file, or a folder of shards.",
        ),
    ]
    part: Annotated[
        Part | None,
        Custom(
            checked=read_part, group="Output", metavar=METAVAR,
            help="Caption only the pictures whose key falls to part I of N, counted from 0. Each part has an output of its own.",
        ),
    ] = None  # fmt: skip
    shard_size: Annotated[
        int,
        Integer(
            low=1, group="Output", expert=True, metavar="N",
            help="Rows of a shard: what a kill costs at most. The one file has a row group of each shard.",
        ),
    ] = 512  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CaptionEngine(LoadOptions):
    """How the bundle is loaded, and how many pictures it decodes together."""

    max_batch: Annotated[
        int | None,
        Integer(
            low=1, group="Engine", metavar="N",
            help=f"Pictures decoded together. Default: {MAX_BATCH}, or the bundle's max_batch where that is less.",
        ),
    ] = None  # fmt: skip
    ray: RayAddress = None


def caption(
    bundle: BundleArgument,
    pictures: Inputs,
    inputs: CaptionInputs,
    options: GenerateOptions,
    loading: CaptionEngine,
    output: CaptionOutput,
    as_json: AsJson = False,
) -> None:
    """Caption every picture of files, folders or Parquet tables."""
    need_extra("parquet", "`vlmexport caption`")
    from ..bundle.folder import Bundle
    from ..captioning.index import Index
    from ..captioning.output import Output
    from ..captioning.ray_captioner import RayCaptioner
    from ..captioning.run import Captioner, SessionCaptioner, caption_all
    from ..session.session import Session
    from .output import print_json
    from .requests import check_combinations, check_draft, read_prompt
    from .schema_file import read_schema

    if loading.ray is not None and loading.device != "cpu":
        raise OptionError(
            f"--ray decodes on CPUs, not on --device {loading.device}: leave one of the two out"
        )
    asked: dict[str, Any] = dict(options)
    schema = read_schema(inputs.schema)
    request_options(asked if schema is None else asked | {"schema": schema})
    check_combinations(options)
    opened = Bundle.open(bundle, loading.how)
    check_draft(opened.manifest, asked)
    prompt = read_prompt(inputs.prompt, inputs.raw)
    index = Index(pictures, inputs.image_column, inputs.key_column)
    _check_first(opened, index, prompt, asked)
    run = {
        "model": opened.manifest.model.fingerprint,
        "weights": opened.manifest.weights_dtype,
        "pictures": index.identity(),
        "prompt": inputs.prompt if prompt is None else str(prompt),
        "raw": inputs.raw,
        "options": {name: str(value) for name, value in sorted(asked.items())},
        "schema": None if inputs.schema is None else hashlib.sha256(inputs.schema.read_bytes()).hexdigest(),
        "part": None if output.part is None else str(output.part),
        "shard_size": output.shard_size,
    }
    if schema is not None:
        asked["schema"] = schema
    most = loading.max_batch or min(MAX_BATCH, opened.manifest.limits.max_batch)
    made = Output(output.out, run)
    load = partial(
        Session.load, opened if loading.ray is None else opened.unread(), loading.device, loading.max_length, most, loading.threads,
        kernel_cache=loading.kernel_cache,
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(made.claimed())
        captioner: Captioner = SessionCaptioner(load, prompt, asked)
        if loading.ray is not None and not made.is_complete():
            from ..engines.onnxruntime import SINGLE_THREAD_BYTES

            small = opened.manifest.weights.total < SINGLE_THREAD_BYTES
            captioner = stack.enter_context(
                closing(RayCaptioner(loading.ray, load, prompt, asked, most, whole_nodes=not small))
            )
        report = stack.enter_context(_progress(as_json))
        captioned = caption_all(captioner, index, made, output.shard_size, output.part, report)
    if not captioned.written:
        log.info("%s was complete", output.out)
    if captioned.errors:
        log.warning(
            "%d of %d pictures could not be captioned; the column `error` says why",
            captioned.errors,
            captioned.pictures,
        )
    if as_json:
        print_json(_document(str(bundle), output, captioned))
        return
    typer.echo(f"captions: {output.out}")


def _check_first(opened: Bundle, index: Index, prompt: Any, options: dict[str, Any]) -> None:
    """Refuse a prompt that cannot be served, before a large model is loaded; a picture that cannot be read has a row."""
    from ..captioning.index import first_picture
    from ..common.errors import ImageError
    from ..families import get_family
    from ..families.base import views_of
    from ..families.plain import PlainText
    from ..images.quiet import quiet_stderr

    picture = first_picture(index)
    if isinstance(picture, ImageError):
        return
    family = get_family(opened.manifest.model.family)
    with quiet_stderr():
        try:
            views = views_of(family, opened, [picture])
            family.prepare(PlainText(opened) if options.get("plain_text") else opened, views, prompt)
        except ImageError as error:
            log.debug("%s", error)


def _document(bundle: str, output: CaptionOutput, captioned: Captioned) -> dict[str, Any]:
    """The JSON of a run (schema: `schemas/caption-1.json`)."""
    return {
        "schema_version": 1,
        "bundle": bundle,
        "output": str(output.out),
        "part": None if output.part is None else str(output.part),
        **asdict(captioned),
    }


@contextmanager
def _progress(as_json: bool) -> Iterator[Any]:
    """Tells how many pictures are done, at what rate, and how long the others take: a bar on a terminal, else a line now and
    then."""
    from .progress import showing

    with showing(as_json) as show:
        told = 0.0

        def report(done: int, total: int, seconds: float) -> None:
            nonlocal told
            rate = done / max(seconds, 1e-9)
            line = (
                f"{done:,} of {total:,} pictures, {rate:.1f} pictures/s, {(total - done) / rate:.0f} s left"
            )
            if sys.stderr.isatty():
                show(line, done, total)
            elif seconds - told >= LINE_EVERY or done == total:
                told = seconds
                log.info("%s", line)

        yield report


LINE_EVERY = 10.0
"""Seconds between two lines of progress."""


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("caption")(with_flags(caption))
