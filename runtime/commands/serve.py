"""`vlmexport serve`: a bundle behind OpenAI's HTTP protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.errors import OptionError
from ..common.optional_deps import need_extra
from ..common.options import File, Integer, Number, Switch, Text, Texts, declared_options
from .option_flags import with_flags
from .options import Bundle as BundleArgument
from .options import EngineOptions

if TYPE_CHECKING:
    from ..serving.http.app import ApiOptions


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where, and to whom."""

    host: Annotated[
        str,
        Text(
            group="Server", metavar="ADDRESS", help="Listen here. 0.0.0.0: on every network of this machine."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, Integer(high=65535, group="Server", metavar="N", help="Listen here. 0: a free one.")
    ] = 8000
    unix_socket: Annotated[
        Path | None,
        File(group="Server", expert=True, metavar="FILE", help="Listen on a Unix socket instead."),
    ] = None
    api_key_file: Annotated[
        Path | None,
        File(
            group="Server", metavar="FILE",
            help="Serve only who sends one of the keys in this file, one a line, as `Authorization: Bearer KEY`.",
        ),
    ] = None  # fmt: skip
    allow_image_host: Annotated[
        Sequence[str],
        Texts(
            group="Server", expert=True, metavar="HOST",
            help="Fetch pictures of http and https URLs from this host, or HOST:PORT; repeat for several. Without, only "
            "pictures within the request are read.",
        ),
    ] = ()  # fmt: skip
    max_body: Annotated[
        int, Integer(low=1, group="Server", expert=True, metavar="MiB", help="Refuse longer bodies, unread.")
    ] = 32
    drain: Annotated[
        float,
        Number(
            group="Server", expert=True, metavar="SECONDS",
            help="At Ctrl-C or SIGTERM: let requests end for so long, and refuse new ones.",
        ),
    ] = 10.0  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How it answers."""

    served_name: Annotated[
        str | None,
        Text(group="Server", metavar="NAME", help="What clients call the model. Default: the model's name."),
    ] = None
    default_temperature: Annotated[
        float,
        Number(group="Server", expert=True, metavar="T", help="Of requests that give none; OpenAI's is 1."),
    ] = 1.0
    special_tokens: Annotated[
        bool,
        Switch(
            group="Server", expert=True,
            help="Read special tokens in messages as such. Without, they are plain text: a stranger cannot write turns.",
        ),
    ] = False  # fmt: skip
    metrics_prefix: Annotated[
        str,
        Text(
            group="Server", expert=True, metavar="TEXT",
            help="In front of the names at /metrics. `vllm:` makes dashboards for vLLM work.",
        ),
    ] = "vlmexport:"  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(EngineOptions):
    """How requests share the model."""

    max_batch: Annotated[
        int | None,
        Integer(
            low=1, group="Engine", metavar="N", help="Decode so many together. Default: the bundle's most."
        ),
    ] = None
    max_waiting: Annotated[
        int, Integer(group="Engine", metavar="N", help="Let so many wait; more are refused with status 429.")
    ] = 64
    max_length: Annotated[
        int | None,
        Integer(
            low=1, group="Engine", expert=True, metavar="N",
            help="Positions to allocate for prompt and answer. Default: the bundle's.",
        ),
    ] = None  # fmt: skip
    picture_cache: Annotated[
        int | None,
        Integer(
            group="Engine", expert=True, metavar="MiB",
            help="Keep embeddings of pictures, for the next request about the same one. 0: none. Default: 64.",
        ),
    ] = None  # fmt: skip
    prefills_per_cycle: Annotated[
        int,
        Integer(
            low=1, group="Engine", expert=True, metavar="N",
            help="Parts of prompts between two cycles. More: first tokens come sooner, and others stand still for longer.",
        ),
    ] = 1  # fmt: skip
    sessions: Annotated[
        int,
        Integer(
            low=1, group="Engine", expert=True, metavar="N",
            help="Processes that decode, each with the model: for small models on many cores.",
        ),
    ] = 1  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TritonOptions:
    """Files for another server, in place of running one."""

    write_triton: Annotated[
        Path | None,
        File(
            group="Output", expert=True, metavar="DIR",
            help="Serve nothing: write the bundle as a model of Triton Inference Server into this model repository.",
        ),
    ] = None  # fmt: skip


def serve(
    bundle: BundleArgument,
    listen: ListenOptions,
    answers: AnswerOptions,
    schedule: ScheduleOptions,
    triton: TritonOptions,
) -> None:
    """Serve a bundle over HTTP."""
    if triton.write_triton is not None:
        _refuse_others(listen, answers, schedule)
        _write_triton(bundle, triton.write_triton, answers.served_name, schedule)
        return
    need_extra("serve", "`vlmexport serve`")
    from ..bundle.folder import Bundle
    from ..serving.http.app import ApiOptions
    from ..serving.http.pictures import Pictures
    from ..serving.http.server import Place, run
    from ..serving.http.translate import Defaults
    from ..serving.messages import Load
    from ..session.picture_cache import MIB

    limits = Bundle.open(bundle).manifest.limits
    keys = read_keys(listen.api_key_file)
    most = listen.max_body << 20
    loading: dict[str, Any] = {
        "device": schedule.device,
        "max_length": schedule.max_length,
        "max_batch": schedule.max_batch or limits.max_batch,
        "threads": schedule.threads,
        "picture_cache": MIB if schedule.picture_cache is None else schedule.picture_cache,
        "kernel_cache": None if schedule.kernel_cache is None else str(schedule.kernel_cache),
    }

    def options(model: str) -> ApiOptions:
        return ApiOptions(
            answers.served_name or model, keys, Pictures(tuple(listen.allow_image_host), most), most,
            Defaults(answers.default_temperature, answers.special_tokens), answers.metrics_prefix,
        )  # fmt: skip

    run(
        Load(str(bundle), loading, schedule.max_waiting, schedule.prefills_per_cycle),
        schedule.sessions,
        Place(listen.host, listen.port, listen.unix_socket),
        options,
        listen.drain,
    )


OF_TRITON = ("served_name", "device", "threads", "max_batch", "max_waiting", "sessions")
"""Options that a model of Triton's takes."""


def _refuse_others(*given: Any) -> None:
    """`OptionError` for what `--write-triton` would ignore."""
    for options in given:
        for name, option in declared_options(type(options)).items():
            value = getattr(options, name)
            if name not in OF_TRITON and value != option.default:
                flag = option.flags(name)[-1]
                raise OptionError(f"{flag} {value}: a model of Triton's has no such option; leave it out")


def _write_triton(bundle: Path, folder: Path, name: str | None, schedule: ScheduleOptions) -> None:
    from ..serving.triton.repository import write_repository

    written = write_repository(
        bundle, folder, name, device=schedule.device, max_batch=schedule.max_batch, max_waiting=schedule.max_waiting,
        threads=schedule.threads, instances=schedule.sessions,
    )  # fmt: skip
    typer.echo(f"model: {written}")


def read_keys(path: Path | None) -> tuple[str, ...]:
    """One a line; empty lines are none. Raises `OptionError` for a file without any."""
    if path is None:
        return ()
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--api-key-file {path}: {error}; name a text file with a key in each line"
        ) from None
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise OptionError(f"--api-key-file {path}: there is no key in it; write one in each line")
    return keys


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("serve")(with_flags(serve))
