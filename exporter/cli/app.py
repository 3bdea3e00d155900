"""The commands `models`, `build` and `verify`, and where all of this room are registered. Everything heavy is imported when a command runs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ...runtime.commands.options import AsJson, Bundle, Device
from ...runtime.common.optional_deps import need_extra
from ..common.memory import use_large_pages
from ..drafts import KINDS
from .compile import BACKENDS, LOWERING, compile_plans, default_target
from .export_draft import export_draft
from .fit import fit
from .progress import shown, tell_loading

log = logging.getLogger(__name__)

Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|HUB_ID|none",
        help="Adapter of peft (LoRA, …) to merge into the model's weights; none leaves one beside them out.",
    ),
]

_SIZE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command("models")(models)
    app.command("build")(build)
    app.command("verify")(verify)
    app.command("fit")(fit)
    app.command("compile")(compile_plans)
    app.command("export-draft")(export_draft)


def models(as_json: AsJson = False) -> None:
    """List the models that can be exported, and their drafts."""
    need_extra("export", "`vlmexport models`")
    from ...runtime.commands.output import console, print_json
    from ..common.aliases import ALIASES
    from ..common.tiny_models import find_tiny_models, install_command
    from ..drafts import draft_kinds
    from ..drafts.folders import shipped_drafts
    from ..families.registry import architectures

    untrained = {kind.name: kind.title for kind in draft_kinds() if not kind.trained}
    rows = []
    for alias in ALIASES:
        drafts = [draft.name for draft in shipped_drafts(alias)]
        rows.append(
            {
                "alias": alias.name, "family": alias.family, "source": alias.hub_id or "bundled",
                "description": alias.description, "drafts": drafts,
            }
        )  # fmt: skip
    if as_json:
        print_json({"schema_version": 1, "models": rows, "architectures": architectures()})
        return
    _print_models(rows)
    if find_tiny_models() is None:
        console().print(
            f"The tiny models (source: bundled) are not installed: {install_command()}", markup=False
        )
    console().print(
        f"Any folder or hub id of a supported class works too ({', '.join(architectures())}). Every model also has the drafts "
        + ", ".join(f"{name} ({title})" for name, title in untrained.items())
        + "."
    )


def _print_models(rows: list[dict[str, Any]]) -> None:
    from ...runtime.commands.output import console
    from ...runtime.commands.table import Table

    table = Table()
    table.add_column("alias", whole=True)
    table.add_column("family", whole=True, drop=2)
    table.add_column("source", whole=True, drop=1)
    for name in ("trained drafts", "description"):
        table.add_column(name, wrap=True)
    for row in rows:
        drafts = ", ".join(row["drafts"]) or "–"
        table.add_row(row["alias"], row["family"], row["source"], drafts, row["description"])
    console().print(table)


def build(
    model: str = typer.Option(
        ..., "--model", metavar="ALIAS|DIR|HUB_ID", help="What to export; see `vlmexport models`."
    ),
    output: Path = typer.Option(..., "-o", "--output", metavar="DIR", help="Folder of the bundle."),
    adapter: Adapter = None,
    draft_layer: int = typer.Option(
        None, "--draft-layer", metavar="N", help="Cut the decoder after N layers; drafts start there."
    ),
    draft: list[str] = typer.Option(
        None,
        "--draft",
        metavar="KIND|PATH",
        help=f"{', '.join(KINDS)}, none, or a draft's folder; the first is the default. Repeatable.",
    ),
    skip_attention: str = typer.Option(
        None,
        "--skip-attention",
        metavar="N,N,…",
        help="Of --draft draft-and-verify: layers, from 0, without whose attention it drafts.",
    ),
    skip_mlp: str = typer.Option(
        None, "--skip-mlp", metavar="N,N,…", help="Likewise, layers without whose MLP it drafts."
    ),
    draft_precision: list[str] = typer.Option(
        None,
        "--draft-precision",
        metavar="[NAME=]int8|int4",
        help="Store the matrices that drafts bring along as integers: cheaper drafts, the same tokens. Of all drafts, or of "
        "the one of that name. Repeatable.",
    ),
    max_length: int = typer.Option(
        None,
        "--max-length",
        metavar="N",
        help="Longest sequence, prompt included (tokens). Default: 512, and room for a picture that stands in the prompt.",
    ),
    max_batch: int = typer.Option(
        16, "--max-batch", metavar="N", help="Most sequences that a session may decode together."
    ),
    max_width: int = typer.Option(
        16, "--max-width", metavar="N", help="New positions in one pass: drafted tokens and one more."
    ),
    verify_width: int = typer.Option(
        None,
        "--verify-width",
        metavar="W",
        help="Rows of every pass of decoding, plain or not, for engines whose kernels give other bits at other widths. "
        "Default: as many as are verified.",
    ),
    max_pixels: int = typer.Option(
        None,
        "--max-pixels",
        metavar="N",
        help="Pixels to which larger pictures and frames are reduced, for models that take any size (qwen2.5-vl: a token "
        "for every 784).",
    ),
    precision: str = typer.Option(
        "float32",
        "--precision",
        metavar="fp32|fp16|bf16",
        help="Of weights, caches and arithmetic; a CPU computes in float32 all the same.",
    ),
    link_weights: bool = typer.Option(
        False,
        "--link-weights",
        help="Leave the model's tensors in its own safetensors files, as hard links in the bundle: no second copy on the "
        "disk. For tensors stored in the bundle's --precision.",
    ),
    default_prompt: str = typer.Option(
        None, "--default-prompt", metavar="TEXT", help="Prompt of requests that give none."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Say what would be built and needed; write nothing."
    ),
    force: bool = typer.Option(False, "--force", help="Replace an existing bundle."),
    parity_memory: str = typer.Option(
        None,
        "--parity-memory",
        metavar="SIZE",
        help="Compare layer by layer when the parameters take more memory than this; default: when it would not fit.",
    ),
    backend: str = typer.Option(None, "--backend", metavar=BACKENDS, help="Also build TensorRT plans."),
    target: str = typer.Option(
        None, "--target", metavar="SM", help="GPU of the plans: sm75 sm80 sm86 sm89 sm120 sm121; native."
    ),
    plan_precision: str = typer.Option(
        "auto", "--plan-precision", metavar="auto|fp16|bf16|fp32", help="Of the plans."
    ),
    lowering: str = typer.Option(
        "auto",
        "--lowering",
        metavar="auto|native|portable",
        help=LOWERING,
    ),
    as_json: AsJson = False,
) -> None:
    """Export a model as a bundle."""
    need_extra("export", "`vlmexport build`")
    use_large_pages()
    from ...runtime.commands.output import print_json
    from ...runtime.common.errors import OptionError
    from ..early_checks import check_build

    for option, value in (
        ("--target", target),
        ("--lowering", None if lowering == "auto" else lowering),
        ("--plan-precision", None if plan_precision == "auto" else plan_precision),
    ):
        if value is not None and backend is None:
            raise OptionError(f"{option} {value} needs --backend {BACKENDS}")
    with quiet_torch():
        request = _request(
            model=model, output=output, adapter=adapter, draft_layer=draft_layer, drafts=list(draft or []),
            skip_attention=_layers(skip_attention, "--skip-attention"), skip_mlp=_layers(skip_mlp, "--skip-mlp"),
            draft_precision=list(draft_precision or []), max_length=max_length,
            max_batch=max_batch, max_width=max_width, verify_width=verify_width, max_pixels=max_pixels, precision=precision,
            link_weights=link_weights, default_prompt=default_prompt, force=force,
            parity_memory=_optional_size(parity_memory, "--parity-memory"), backend=backend,
            target=target or default_target(backend), plan_precision=plan_precision, lowering=lowering,
        )  # fmt: skip
        check_build(request, write=not dry_run)
        tell_loading()
        _tell_request(request)
        if dry_run:
            from ..pipeline.dry_run import dry_run as try_build

            with shown(as_json) as progress:
                found = try_build(request, progress)
            if as_json:
                print_json({"schema_version": 1, **found.model_dump(mode="json")})
            else:
                _print_dry_run(found)
            return
        from ..pipeline.build import build_bundle

        with shown(as_json) as progress:
            report = build_bundle(request, progress)
    _tell_report(report)
    if as_json:
        print_json({"schema_version": 1, **report.model_dump(mode="json")})
    else:
        _print_report(report)


def verify(
    bundle: Bundle,
    model: str = typer.Option(
        ..., "--model", metavar="ALIAS|DIR|HUB_ID", help="The model it was built from."
    ),
    adapter: Adapter = None,
    draft: list[str] = typer.Option(
        None, "--draft", metavar="PATH", help="Folder of a trained draft in the bundle. Repeatable."
    ),
    prompts: int = typer.Option(
        3, "--prompts", metavar="N", min=1, help="Requests on which losslessness is checked."
    ),
    max_new_tokens: int = typer.Option(
        24, "--max-new-tokens", metavar="N", min=1, help="Tokens of each request."
    ),
    image: list[Path] = typer.Option(
        None, "--image", metavar="FILE", help="Images to use instead of generated ones. Repeatable."
    ),
    parity_memory: str = typer.Option(None, "--parity-memory", metavar="SIZE", help="As in `build`."),
    device: Device = "cpu",
    lossy: str = typer.Option(None, "--lossy", hidden=True),
    as_json: AsJson = False,
) -> None:
    """Compare a bundle with its model: parity and losslessness."""
    if lossy is not None:
        from ...runtime.common.errors import OptionError

        raise OptionError(
            f"--lossy {lossy}: verify checks that the output is the model's, which lossy acceptance gives up; leave it out"
        )
    need_extra("export", "`vlmexport verify`")
    use_large_pages()
    from ...runtime.commands.output import console, print_json
    from ...runtime.commands.requests import read_picture
    from ..early_checks import check_verify

    size = _optional_size(parity_memory, "--parity-memory")
    pictures = [read_picture(path) for path in image or []]  # refused before hours of comparing
    check_verify(bundle, model, draft or [], adapter)
    tell_loading()
    from ..parity.verify import verify_bundle

    with quiet_torch(), shown(as_json) as progress:
        log.debug("comparing %s with %s: %d prompts of %d tokens", bundle, model, prompts, max_new_tokens)
        report = verify_bundle(
            bundle, model, draft_folders=[Path(d) for d in draft or []], prompts=prompts, max_new_tokens=max_new_tokens,
            images=pictures, parity_memory=size, progress=progress,
            device=device, adapter=adapter,
        )  # fmt: skip
    log.debug("%d files have their SHA-256", report.files_checked)
    if as_json:
        print_json({"schema_version": 1, **report.to_dict()})
    else:
        from .tables import verify_tables

        for table in verify_tables(report):
            console().print(table)
        sys.stdout.write(("Verified." if report.ok else "NOT verified.") + "\n")
    if not report.ok:
        raise typer.Exit(1)


def parse_size(text: str, option: str) -> int:
    """`4GiB`, `512M`, `0` → bytes (binary units). Raises OptionError."""
    import re

    from ...runtime.common.errors import OptionError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise OptionError(f"{option} {text!r} is not a size; write 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _SIZE[match[2]])


def _layers(text: str | None, option: str) -> list[int] | None:
    """`3,5,8` → numbers of layers. Raises OptionError."""
    from ...runtime.common.errors import OptionError

    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise OptionError(f"{option} {text!r:.80} is no list of layers; write 3,5,8")
    return [int(part) for part in parts]


def _optional_size(text: str | None, option: str) -> int | None:
    return None if text is None else parse_size(text, option)


def _request(**values: Any) -> Any:
    """A BuildRequest; wrong values become one-line errors."""
    from pydantic import ValidationError

    from ...runtime.common.errors import OptionError
    from ..pipeline.request import BuildRequest

    try:
        return BuildRequest(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = "--" + str(first["loc"][0]).replace("_", "-")
        raise OptionError(f"{name}: {first['msg']} (given {first.get('input')!r})") from error


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Keeps notes and progress bars of PyTorch and transformers off the terminal."""
    import logging
    import os
    import warnings

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DISABLE", "1")
    for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _tell_request(request: Any) -> None:
    """With `-v`: what is asked for, and what it is done with."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    import torch

    from ...runtime.hardware.machine import describe

    machine = describe()
    log.debug(
        "model %s, drafts: %s, precision %s, up to %s tokens, batch %d, width %d; output %s",
        request.model,
        ", ".join(request.drafts) or "the model's own",
        request.precision, request.max_length or "as many as it needs", request.max_batch, request.max_width, request.output,
    )  # fmt: skip
    log.debug(
        "machine: %s, %d cores, load %s; PyTorch %s with %d threads",
        machine["cpu"], machine["cores"], machine["load"], torch.__version__, torch.get_num_threads(),
    )  # fmt: skip


def _tell_report(report: Any) -> None:
    """With `-v`: every graph, the weights, and how long the stages of a build took."""
    from ...runtime.commands.output import quantity, size
    from ..pipeline.timing import stage_line

    for graph in report.graphs:
        log.debug("graph %s (%s): %d nodes, %s", graph.name, graph.role, graph.nodes, size(graph.bytes))
    log.debug(
        "weights: %s, every tensor once; %s parameters and %s of drafts",
        size(report.weight_bytes), quantity(report.parameters), quantity(report.draft_parameters),
    )  # fmt: skip
    log.debug("stages: %s; %.1f s in all", stage_line(report.stages), report.seconds)


def _print_dry_run(found: Any) -> None:
    from ...runtime.commands.output import console
    from .tables import dry_run_tables

    for table in dry_run_tables(found):
        console().print(table)
    for notice in found.notices:
        console().print(notice, markup=False)
    console().print("Nothing was written.")


def _print_report(report: Any) -> None:
    from ...runtime.commands.output import console, quantity
    from ...runtime.commands.plans import plans_tables
    from ...runtime.commands.verbosity import is_verbose
    from ..pipeline.timing import stage_line
    from .tables import bundle_size, draft_names, parity_line, parity_table, quantization_notes

    out = console()
    if report.parity:
        out.print(parity_table(report.parity) if is_verbose() else parity_line(report.parity))
        for note in quantization_notes(report.parity):
            out.print(note, markup=False)
    for table in plans_tables(report.plans):
        out.print(table)
    drafts = draft_names(report.drafts, report.draft_precisions, report.speculative)
    out.print(
        f"{report.output}: {report.family}, {quantity(report.parameters)} parameters, "
        f"{bundle_size(report.bytes, report.linked_bytes)}, decoder cut at "
        f"{report.cuts}, drafts: {drafts}, {report.seconds:.0f} s",
        markup=False,
    )
    out.print(f"Time: {stage_line(report.stages)}", markup=False)
    for notice in report.notices:
        out.print(notice, markup=False)
    example = "--image IMAGE" if report.family not in ("llama", "t5") else '--prompt "…"'
    out.print(f"Next: vlmexport run {report.output} {example}", markup=False)
