"""`vlmexport train`, `search`, `generate-data` and `eval`; mounted by the command line when the training extra is installed."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..exporter.common.memory import use_large_pages
from ..runtime.commands.output import print_json
from ..runtime.commands.plot import check_plot
from ..runtime.common.atomic_files import check_folder
from ..runtime.common.errors import OptionError
from ..runtime.common.optional_deps import need_extra
from .calibrate import tune
from .common import help_texts
from .common.processes import described, join_processes, launched_processes, run_alone, said_once
from .early_checks import check_inputs
from .objectives import KINDS
from .search import KINDS as SEARCHED
from .training.flags import read_flags, with_option_flags

log = logging.getLogger(__name__)

Model = Annotated[str, typer.Option("--model", help="Alias, folder or hub id of the target.")]
Data = Annotated[list[str], typer.Option("--data", help=f"{help_texts.DATA}. Repeatable.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the result.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail at the first bad record in place of skipping it.")
]
Prompt = Annotated[str, typer.Option("--prompt", help=help_texts.PROMPT)]
Limit = Annotated[
    int | None, typer.Option("--limit", help="Use the first so many records, also of --validation.")
]
Inside = Annotated[Path | None, typer.Option("--inside", metavar="FOLDER", help=help_texts.INSIDE)]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, help="CPU threads (default: every core, or torch's choice).")
]
NewTokens = Annotated[
    int, typer.Option("--max-new-tokens", min=2, help="Limit per answer; cut ones are counted.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda[:N].")]


@with_option_flags
def train(
    model: Model,
    data: Data,
    out: Out,
    options: dict[str, Any],
    draft: Annotated[str, typer.Option("--draft", help=f"Draft kind: {', '.join(KINDS)}.")] = next(
        iter(KINDS)
    ),
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", help="Loss weights of a paper; of FastVLM's table 1: our, our+cs, our+cs+kd."
        ),
    ] = None,
    validation: Annotated[
        list[str] | None,
        typer.Option(
            "--validation", help="Data to choose the best draft by (default: last 5 %). Repeatable."
        ),
    ] = None,
    cache_features: Annotated[
        Path | None,
        typer.Option("--cache-features", help="Keep the target's rows here; epochs then cost little."),
    ] = None,
    cache_dtype: Annotated[str, typer.Option("--cache-dtype", help="float16 or float32.")] = "float16",
    search: Annotated[
        int | None,
        typer.Option(
            "--search",
            min=1,
            help="Train so many imitation networks of other shapes, and say which none beats in agreement and FLOPs; "
            "what is given of a shape stays.",
        ),
    ] = None,
    eval_every: Annotated[int, typer.Option("--eval-every", min=1)] = 250,
    save_every: Annotated[int, typer.Option("--save-every", min=1)] = 100,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    inside: Inside = None,
    restart: Annotated[bool, typer.Option("--restart", help="Do not continue the run in --out.")] = False,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train a draft for a target; only --joint and --fine-tune change it; the same command continues a killed run."""
    need_extra("train", "`vlmexport train`")
    if search is not None:
        need_extra("search", "--search")
        if draft != "imitation":
            raise OptionError(f"--search tries shapes of imitation networks, not of --draft {draft}")
    use_large_pages()
    own, loop = read_flags(draft, options, preset)
    launched_processes()  # refused before anything is loaded
    check_inputs(model, [*data, *(validation or [])], inside)
    _quiet()
    from ..exporter.drafts.common.files import MODEL
    from .data import load_records
    from .targets.target import find_device, load_target
    from .training.run import train_draft

    place = find_device(device)
    state = join_processes(cpu=place.type == "cpu")
    _use_threads(threads)  # accelerate chooses a number for several processes
    how = {
        "cache": cache_features, "cache_dtype": cache_dtype, "eval_every": eval_every, "save_every": save_every,
        "restart": restart,
    }  # fmt: skip
    with said_once(state):
        log.debug("%s", described(state))
        records = load_records(data, strict, prompt, limit, inside)
        held = load_records(validation, strict, prompt, limit, inside) if validation else None
        target = load_target(model, place)
        start = time.monotonic()
        if search is not None:
            document = _search(target, records, own, loop, options, search, out, held, how)
        else:
            found = train_draft(target, records, own, loop, out, held, **how)
    if not state.is_main_process:
        return
    if search is not None:
        _print_search(document, out, as_json)
        return
    if as_json:
        from .report import training_report

        seconds = round(time.monotonic() - start, 2)
        print_json(training_report(target, records, held, found, out / "best", loop.steps, seconds))
        return
    typer.echo(f"draft: {out / 'best'}")
    if found.trained_from is not None:
        typer.echo(f"its target, which changed: {out / 'best' / MODEL}")


def _search(
    target: Any,
    records: Any,
    own: Any,
    loop: Any,
    given: dict[str, Any],
    trials: int,
    out: Path,
    held: Any,
    how: dict[str, Any],
) -> dict[str, Any]:
    """`train --search`: the front of shapes."""
    from .training.imitation_search import SPACE, search_shapes

    fixed = {name: given[name] for name in SPACE if given[name] is not None}
    return search_shapes(target, records, own, loop, fixed, trials, out, held, **how)


def _print_search(document: dict[str, Any], out: Path, as_json: bool) -> None:
    from .training.imitation_search import FILE, table

    if as_json:
        print_json(document)
        return
    for line in table(document):
        typer.echo(line)
    typer.echo(f"trials: {out / FILE}")


def search(
    model: Model,
    data: Data,
    out: Out,
    draft: Annotated[str, typer.Option("--draft", help=f"Draft kind: {', '.join(SEARCHED)}.")] = next(
        iter(SEARCHED)
    ),
    trials: Annotated[int, typer.Option("--trials", min=1, help="Candidates that are looked at.")] = 200,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the candidates that are drawn.")] = 0,
    draft_length: Annotated[
        int, typer.Option("--draft-length", min=1, help="Most drafted tokens of a cycle.")
    ] = 8,
    confidence_threshold: Annotated[
        float,
        typer.Option(
            "--confidence-threshold", help="Of a request's first cycle; it then follows what was accepted."
        ),
    ] = 0.8,
    validation: Annotated[
        list[str] | None,
        typer.Option(
            "--validation", help="Data to measure the result on (default: last quarter). Repeatable."
        ),
    ] = None,
    max_new_tokens: NewTokens = 96,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    inside: Inside = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Search a draft out of what a target has: the sublayers that it can leave out."""
    need_extra("search", "`vlmexport search`")
    run_alone("vlmexport search")
    check_inputs(model, data, inside)
    use_large_pages()
    _quiet()
    _use_threads(threads)
    from .data import load_records
    from .evaluation.run import answered
    from .report import search_report
    from .search import search_of
    from .search.draft_and_verify import SearchOptions
    from .targets.target import load_target
    from .training.run import check_writer

    run = search_of(draft)
    options = SearchOptions(trials, seed, draft_length, confidence_threshold)
    target = load_target(model, device)
    sets = []
    for names in (data, validation):
        records = load_records(names, strict, prompt, limit, inside) if names else None
        if records is not None:
            check_writer(target, records)
            records = answered(target, records, max_new_tokens, _say)
        sets.append(records)
    found = run(target, *sets, options, out, _say)
    report = search_report(target, sets[0], sets[1], found, out)
    if as_json:
        print_json(report)
        return
    held = report["held_out"]
    typer.echo(f"left out: attention {_numbers(found.skip.attention)}; MLP {_numbers(found.skip.mlp)}")
    typer.echo(
        f"on held-out answers: tau {held['tau']:.2f}, {held['speedup_by_weights']:.2f} times plain decoding by weights"
    )
    typer.echo(f"draft: {out}")


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def generate_data(
    model: Model,
    data: Data,
    out: Out,
    max_new_tokens: NewTokens = 96,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Draw the answers; 0: the likeliest token, always.")
    ] = 0.0,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Drawn answers per record.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of drawn answers.")] = 0,
    min_answer: Annotated[
        int, typer.Option("--min-answer", min=0, help="Leave out answers of fewer tokens; they are counted.")
    ] = 0,
    prompt_suffix: Annotated[
        str,
        typer.Option(
            "--prompt-suffix",
            help="Words behind every prompt, for instance to ask for long answers; the data keeps them.",
        ),
    ] = "",
    shard_size: Annotated[int, typer.Option("--shard-size", min=1)] = 256,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            min=1,
            help="Answers decoded together (default: what suits the memory; PyTorch begins with 128 and halves them where a "
            "GPU's runs out).",
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="runtime, torch, or auto: PyTorch where it has a GPU, else the runtime."
        ),
    ] = "auto",
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="A bundle of --model, in place of one that is exported and kept."),
    ] = None,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    inside: Inside = None,
    device: Device = "auto",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a target's own answers, to train drafts on; the same command continues a killed run."""
    need_extra("train", "`vlmexport generate-data`")
    run_alone("vlmexport generate-data")
    check_inputs(model, data, inside)
    use_large_pages()
    _quiet()
    _use_threads(threads)
    from .data import load_records
    from .generation.answers import GenerationOptions
    from .generation.engine import open_answers
    from .generation.generate import generate_data as run

    options = GenerationOptions(max_new_tokens, temperature, samples, seed, min_answer)
    records = load_records(data, strict, prompt, limit, inside).asked_with(prompt_suffix)
    answers = open_answers(model, engine, device, bundle, max_new_tokens, batch_size, threads, _say)
    found = run(answers, records, out, options, shard_size, strict)
    if as_json:
        from .report import generation_report

        print_json(generation_report(answers, records, out, found))
        return
    typer.echo(f"data: {out}")


def evaluate(
    model: Model,
    data: Data,
    draft: Annotated[
        list[str] | None, typer.Option("--draft", help="A draft's folder, or KIND@N; repeatable.")
    ] = None,
    draft_length: Annotated[int, typer.Option("--draft-length", min=1)] = 5,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            help="Judge the answers too: captions, vqa, choices, exact, yes-no; auto: what fits the data; none.",
        ),
    ] = "none",
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="Predict speed-ups by the pass times that this bundle holds."),
    ] = None,
    given_text: Annotated[
        bool,
        typer.Option("--given-text", help="Teacher-force the data's texts in place of the target's own."),
    ] = False,
    max_new_tokens: NewTokens = 96,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            min=1,
            help="Records, or choices of one, that go through the target together; halved where a GPU's memory runs out.",
        ),
    ] = 64,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw how drafts do by position, depth and rank into this file."),
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option("--answers", help="Write the judged answers into this file, a JSON line each."),
    ] = None,
    as_json: AsJson = False,
    limit: Limit = None,
    prompt: Prompt = "",
    strict: Strict = False,
    inside: Inside = None,
    device: Device = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, help="CPU threads (default: one for small models, else torch's choice)."
        ),
    ] = None,
) -> None:
    """Measure how many drafted tokens a target accepts on held-out data, and what its answers are worth."""
    need_extra("train", "`vlmexport eval`")
    run_alone("vlmexport eval")
    use_large_pages()
    if plot is not None:
        if not draft:
            raise OptionError(f"--plot {plot} draws what drafts do, and there is none; give --draft")
        check_plot(plot)
    if answers is not None:
        check_folder("--answers", answers)
    from ..exporter.cli.progress import tell_loading
    from .early_checks import check_evaluation

    check_evaluation(model, data, draft or [], task, bundle, inside)
    tell_loading()
    from ..runtime.bundle.folder import Bundle
    from .data import load_records
    from .evaluation.speed import Machine
    from .evaluation.task import chosen_task

    machine = None if bundle is None else Machine(Bundle.open(bundle))
    records = load_records(data, strict, prompt, limit, inside)
    judged = chosen_task(task, records, bool(draft), answers, _say)
    _quiet()
    from .evaluation import report as reports
    from .evaluation.run import evaluate as run
    from .targets.target import load_target
    from .targets.threads import with_threads

    target = load_target(model, device)
    if machine is not None:
        machine.bundle.check_model(target.name, target.fingerprint)
    limit_of_answers = None if given_text else max_new_tokens
    kept = answers is not None
    with with_threads(target, threads):
        found = run(
            target,
            records,
            draft or [],
            draft_length,
            limit_of_answers,
            judged,
            machine,
            _say,
            kept,
            batch_size,
        )
    if as_json:
        print_json(reports.document(found, target.name, data, None if machine is None else machine.name))
    else:
        for line in reports.table(found):
            typer.echo(line)
    # Behind what was measured: a file that cannot be written takes none of that away.
    if answers is not None:
        reports.write_answers(found, records, answers)
    if plot is not None:
        from .evaluation.plot import plot_all

        plot_all(found.drafts, plot)


def register(app: typer.Typer) -> None:
    """Mounts the commands of this room."""
    app.command("train")(train)
    app.command("search")(search)
    app.command("generate-data")(generate_data)
    app.command("eval")(evaluate)
    app.command("tune")(tune)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _quiet() -> None:
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _use_threads(threads: int | None) -> None:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
