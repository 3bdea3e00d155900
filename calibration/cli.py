"""`vlmexport train`, `search`, `generate-data`, `eval` and `quantize`; mounted by the command line when the training extra is installed."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from ..exporter.common.memory import use_large_pages
from ..runtime.commands.option_flags import with_flags
from ..runtime.commands.options import AsJson
from ..runtime.commands.output import print_json
from ..runtime.commands.plot import check_plot
from ..runtime.common.atomic_files import check_folder
from ..runtime.common.errors import OptionError
from ..runtime.common.optional_deps import need_extra
from .answer_options import AnswerSettings, AskedData, Parts, check_join
from .calibrate import tune
from .command_options import (
    DataOptions,
    EvalSettings,
    MachineOptions,
    QuantizeSettings,
    SearchSettings,
    TrainRun,
    ValidationData,
)
from .common.processes import described, join_processes, launched_processes, run_alone, said_once
from .early_checks import check_inputs
from .objectives import check_shape_search
from .training.flags import read_flags, with_option_flags

log = logging.getLogger(__name__)


@with_flags
@with_option_flags
def train(
    inputs: ValidationData,
    options: dict[str, Any],
    run: TrainRun,
    machine: MachineOptions,
    as_json: AsJson = False,
) -> None:
    """Train a draft for a target; only --joint and --fine-tune change it; the same command continues a killed run."""
    need_extra("train", "`vlmexport train`")
    if run.search is not None:
        need_extra("search", "--search")
        check_shape_search(run.draft)
    use_large_pages()
    own: Any
    own, loop = read_flags(run.draft, options, run.preset)
    launched_processes()  # refused before anything is loaded
    check_inputs(inputs.model, [*inputs.data, *inputs.validation], inputs.inside)
    _quiet()
    from ..exporter.drafts.common.files import MODEL
    from .targets.target import find_device, load_target
    from .training.run import FeatureCache, Schedule, train_draft

    place, out = find_device(machine.device), run.out
    state = join_processes(cpu=place.type == "cpu")
    _use_threads(machine.threads)  # accelerate chooses a number for several processes
    cache = FeatureCache(run.cache_features, run.cache_dtype)
    schedule = Schedule(run.eval_every, run.save_every, run.restart)
    with said_once(state):
        log.debug("%s", described(state))
        records, held = inputs.records(), inputs.held_out()
        target = load_target(inputs.model, place)
        start = time.monotonic()
        if run.search is not None:
            search = import_module(f".training.{own.shape_search}", __package__)
            fixed = {name: options[name] for name in search.SPACE if options[name] is not None}
            document = search.search_shapes(
                target, records, own, loop, fixed, run.search, out, held, cache=cache, schedule=schedule
            )
        else:
            draft = train_draft(target, records, own, loop, out, held, cache, schedule)
    if not state.is_main_process:
        return
    if run.search is not None:
        _print_search(search, document, out, as_json)
        return
    if as_json:
        from .report import training_report

        seconds = round(time.monotonic() - start, 2)
        print_json(training_report(target, records, held, draft, out / "best", loop.steps, seconds))
        return
    typer.echo(f"draft: {out / 'best'}")
    if draft.trained_from is not None:
        typer.echo(f"its target, which changed: {out / 'best' / MODEL}")


def _print_search(search: Any, document: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print_json(document)
        return
    for line in search.table(document):
        typer.echo(line)
    typer.echo(f"trials: {out / search.FILE}")


@with_flags
def search(
    inputs: ValidationData, settings: SearchSettings, machine: MachineOptions, as_json: AsJson = False
) -> None:
    """Search a draft out of what a target has: the sublayers that it can leave out."""
    need_extra("search", "`vlmexport search`")
    run_alone("vlmexport search")
    check_inputs(inputs.model, inputs.data, inputs.inside)
    use_large_pages()
    _quiet()
    _use_threads(machine.threads)
    from .evaluation.run import answered
    from .report import search_report
    from .search import search_of
    from .search.draft_and_verify import SearchOptions
    from .targets.target import load_target
    from .training.run import check_writer

    run = search_of(settings.draft)
    options = SearchOptions(
        settings.trials, settings.seed, settings.draft_length, settings.confidence_threshold
    )
    target = load_target(inputs.model, machine.device)
    sets = []
    for records in (inputs.records(), inputs.held_out()):
        if records is not None:
            check_writer(target, records)
            records = answered(target, records, settings.max_new_tokens, _say)
        sets.append(records)
    draft = run(target, *sets, options, settings.out, _say)
    report = search_report(target, sets[0], sets[1], draft, settings.out)
    if as_json:
        print_json(report)
        return
    held = report["held_out"]
    typer.echo(f"left out: attention {_numbers(draft.skip.attention)}; MLP {_numbers(draft.skip.mlp)}")
    typer.echo(
        f"on held-out answers: tau {held['tau']:.2f}, {held['speedup_by_weights']:.2f} times plain decoding by weights"
    )
    typer.echo(f"draft: {settings.out}")


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


@with_flags
def generate_data(
    inputs: AskedData,
    settings: AnswerSettings,
    machine: MachineOptions,
    parts: Parts = None,
    as_json: AsJson = False,
) -> None:
    """Write a target's own answers, to train drafts on; the same command continues a killed run."""
    need_extra("train", "`vlmexport generate-data`")
    run_alone("vlmexport generate-data")
    check_join(inputs, settings, machine, parts or [])
    if settings.join:
        from .generation.join import join_parts

        joined = join_parts(parts or [], settings.out)
        if as_json:
            print_json(joined)
        else:
            typer.echo(f"data: {settings.out}")
        return
    check_inputs(inputs.model, inputs.data, inputs.inside)
    use_large_pages()
    _quiet()
    _use_threads(machine.threads)
    from .generation.answers import GenerationOptions
    from .generation.engine import open_answers
    from .generation.generate import generate_data as run

    options = GenerationOptions(
        settings.max_new_tokens, settings.temperature, settings.samples, settings.seed, settings.min_answer
    )
    records = inputs.records().asked_with(settings.prompt_suffix)
    answers = open_answers(
        inputs.model, settings.engine, machine.device, settings.bundle, settings.max_new_tokens, settings.batch_size,
        machine.threads, _say, settings.ray,
    )  # fmt: skip
    generated = run(
        answers, records, settings.out, options, settings.shard_size, inputs.strict, part=settings.part
    )
    if as_json:
        from .report import generation_report

        print_json(generation_report(answers, records, settings.out, generated, settings.part))
        return
    typer.echo(f"data: {settings.out}")


@with_flags
def evaluate(
    inputs: DataOptions, settings: EvalSettings, machine: MachineOptions, as_json: AsJson = False
) -> None:
    """Measure how many drafted tokens a target accepts on held-out data, and what its answers are worth."""
    need_extra("train", "`vlmexport eval`")
    run_alone("vlmexport eval")
    use_large_pages()
    drafts, plot, answers = settings.draft, settings.plot, settings.answers
    if plot is not None:
        if not drafts:
            raise OptionError(f"--plot {plot} draws what drafts do, and there is none; give --draft")
        check_plot(plot)
    if answers is not None:
        check_folder("--answers", answers)
    from ..exporter.cli.progress import tell_loading
    from .early_checks import check_evaluation

    check_evaluation(inputs.model, inputs.data, drafts, settings.task, settings.bundle, inputs.inside)
    tell_loading()
    from ..runtime.bundle.folder import Bundle
    from .evaluation.speed import Machine
    from .evaluation.task import chosen_task

    measured = None if settings.bundle is None else Machine(Bundle.open(settings.bundle))
    records = inputs.records()
    judged = chosen_task(settings.task, records, bool(drafts), answers, _say)
    _quiet()
    from .evaluation import report as reports
    from .evaluation.run import evaluate as run
    from .targets.target import load_target
    from .targets.threads import with_threads

    target = load_target(inputs.model, machine.device)
    if measured is not None:
        measured.bundle.check_model(target.name, target.fingerprint)
    with with_threads(target, machine.threads):
        evaluation = run(
            target, records, drafts, settings.draft_length, None if settings.given_text else settings.max_new_tokens,
            judged, measured, _say, answers is not None, settings.batch_size,
        )  # fmt: skip
    if as_json:
        name = None if measured is None else measured.name
        print_json(reports.document(evaluation, target.name, inputs.data, name))
    else:
        for line in reports.table(evaluation):
            typer.echo(line)
    # Behind what was measured: a file that cannot be written takes none of that away.
    if answers is not None:
        reports.write_answers(evaluation, records, answers)
    if plot is not None:
        from .evaluation.plot import plot_all

        plot_all(evaluation.drafts, plot)


@with_flags
def quantize(
    inputs: ValidationData, settings: QuantizeSettings, machine: MachineOptions, as_json: AsJson = False
) -> None:
    """Write a model with integer weights, chosen by data, and measure what they cost; `build --model` reads it."""
    need_extra("train", "`vlmexport quantize`")
    run_alone("vlmexport quantize")
    from .early_checks import check_quantization

    choice = check_quantization(
        inputs.model, [*inputs.data, *inputs.validation], inputs.inside, settings.weights, settings.out
    )
    use_large_pages()
    _quiet()
    from .quantization.options import QuantizeOptions
    from .quantization.report import table
    from .quantization.run import quantize as run
    from .targets.target import load_target
    from .targets.threads import with_threads

    options = QuantizeOptions(
        choice, settings.method, settings.samples, settings.max_tokens, settings.max_loss
    )
    records, held = inputs.records(), inputs.held_out()
    target = load_target(inputs.model, machine.device)
    with with_threads(target, machine.threads):
        report = run(target, records, held, options, settings.out, _say)
    if as_json:
        print_json(report)
        return
    for line in table(report):
        typer.echo(line)
    typer.echo(f"model: {settings.out}")


def register(app: typer.Typer) -> None:
    """Mounts the commands of this room."""
    app.command("train")(train)
    app.command("search")(search)
    app.command("generate-data")(generate_data)
    app.command("eval")(evaluate)
    app.command("quantize")(quantize)
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
