"""`vlmexport train`, `generate-data` and `eval`; mounted by the command line when the training extra is installed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..runtime.errors import OptionError

Model = Annotated[str, typer.Option("--model", help="Alias, folder or hub id of the target.")]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="scenes:SPLIT[:COUNT], coco:JSON,IMAGES[,SPLIT], images:FOLDER, FILE.jsonl, or a generate-data folder.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the result.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail at the first bad record in place of skipping it.")
]
Prompt = Annotated[str, typer.Option("--prompt", help="Prompt of records that have none.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Use the first so many records.")]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads (default: torch's choice).")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda[:N].")]


def train(
    model: Model,
    data: Data,
    out: Out,
    draft_layer: Annotated[int, typer.Option("--draft-layer", help="n: the draft follows decoder layer n.")],
    draft: Annotated[str, typer.Option("--draft", help="Draft kind.")] = "imitation",
    preset: Annotated[
        str | None, typer.Option("--preset", help="Losses of FastVLM's table 1: our, our+cs, our+cs+kd.")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option("--validation", help="Data to choose the best network by (default: last 5 %)."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps")] = 1500,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Records per step.")] = 64,
    lr: Annotated[float, typer.Option("--lr")] = 1e-3,
    weight_decay: Annotated[float, typer.Option("--weight-decay")] = 0.01,
    warmup: Annotated[int, typer.Option("--warmup", help="Steps.")] = 50,
    clip: Annotated[float, typer.Option("--clip", help="Largest gradient norm.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    ce: Annotated[float, typer.Option("--ce", help="Weight of the cross entropy.")] = 1.0,
    cosine: Annotated[
        float, typer.Option("--cosine", help="Weight of 1 - cos to the fused residuals.")
    ] = 0.0,
    kd: Annotated[
        float, typer.Option("--kd", help="Weight of the distance to the target's distribution.")
    ] = 1.0,
    kd_distance: Annotated[str, typer.Option("--kd-distance", help="forward, reverse or tv.")] = "forward",
    fusion: Annotated[
        str, typer.Option("--fusion", help="average, last, concat-frozen or concat-stopped.")
    ] = "average",
    num_linear: Annotated[int, typer.Option("--num-linear", help="1 or 2.")] = 2,
    activation: Annotated[str, typer.Option("--activation")] = "gelu",
    norm: Annotated[str, typer.Option("--norm", help="layer_norm, rms_norm or none.")] = "layer_norm",
    residual: Annotated[bool, typer.Option("--residual/--no-residual")] = True,
    cache_features: Annotated[
        Path | None,
        typer.Option("--cache-features", help="Keep the target's rows here; epochs then cost little."),
    ] = None,
    cache_dtype: Annotated[str, typer.Option("--cache-dtype", help="float16 or float32.")] = "float16",
    eval_every: Annotated[int, typer.Option("--eval-every", min=1)] = 250,
    save_every: Annotated[int, typer.Option("--save-every", min=1)] = 100,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    restart: Annotated[bool, typer.Option("--restart", help="Do not continue the run in --out.")] = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Train a draft for a frozen target; the same command continues a killed run."""
    if draft != "imitation":
        raise OptionError(f"--draft {draft!r} cannot be trained; this version trains: imitation")
    _quiet(threads)
    from .training.config import TrainConfig, with_preset
    from .training.run import train_imitation

    options: dict[str, Any] = {
        "layer": draft_layer, "steps": steps, "batch_size": batch_size, "lr": lr, "weight_decay": weight_decay,
        "warmup": warmup, "clip": clip, "seed": seed, "ce": ce, "cosine": cosine, "kd": kd,
        "kd_distance": kd_distance, "fusion": fusion, "num_linear": num_linear, "activation": activation,
        "norm": norm, "residual": residual,
    }  # fmt: skip
    config = TrainConfig(**with_preset(options, preset))  # type: ignore[arg-type]
    from .data import load_records
    from .targets.target import load_target

    target = load_target(model, device)
    records = load_records(data, strict, prompt, limit)
    held = load_records(validation, strict, prompt) if validation else None
    train_imitation(
        target, records, config, out, held,
        cache=cache_features, cache_dtype=cache_dtype, eval_every=eval_every, save_every=save_every, restart=restart,
    )  # fmt: skip
    typer.echo(f"draft: {out / 'best'}")


def generate_data(
    model: Model,
    data: Data,
    out: Out,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2)] = 96,
    shard_size: Annotated[int, typer.Option("--shard-size", min=1)] = 256,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1)] = 128,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Write a target's own greedy answers, to train drafts on; the same command continues a killed run."""
    _quiet(threads)
    from .data import load_records
    from .generation.generate import generate_data as run
    from .targets.target import load_target

    records = load_records(data, strict, prompt, limit)
    run(load_target(model, device), records, out, max_new_tokens, shard_size, batch_size, strict)
    typer.echo(f"data: {out}")


def evaluate(
    model: Model,
    data: Data,
    draft: Annotated[list[str], typer.Option("--draft", help="A draft folder, or early-exit@N; repeatable.")],
    draft_length: Annotated[int, typer.Option("--draft-length", min=1)] = 5,
    given_text: Annotated[
        bool,
        typer.Option("--given-text", help="Teacher-force the data's texts in place of the target's own."),
    ] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2)] = 96,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw acceptance by position into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """Measure how many drafted tokens a target accepts on held-out data."""
    _quiet(threads)
    from .data import load_records
    from .evaluation.run import evaluate_drafts
    from .targets.target import load_target

    target = load_target(model, device)
    records = load_records(data, strict, prompt, limit)
    results = evaluate_drafts(target, records, draft, draft_length, None if given_text else max_new_tokens)
    if plot is not None:
        from .evaluation.plot import plot_by_position

        plot_by_position(results, plot)
    if as_json:
        document = {
            "model": target.name,
            "data": data,
            "drafts": {k: r.to_dict() for k, r in results.items()},
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(f"{'draft':40}  alpha    tau  agreement  Σmin(p,q)")
    for name, r in results.items():
        typer.echo(f"{name:40} {r.alpha:6.4f} {r.tau:6.3f} {r.agreement:10.4f} {r.overlap:10.4f}")


def register(app: typer.Typer) -> None:
    """Mounts the commands of this room."""
    app.command("train")(train)
    app.command("generate-data")(generate_data)
    app.command("eval")(evaluate)


def _quiet(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
