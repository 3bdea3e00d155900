"""Acceptance of several drafts of one target on the same answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...runtime.common.errors import InputError, OptionError
from ..data.reading.records import Record, RecordSet
from ..generation.answers import GenerationOptions
from ..generation.torch_answers import TorchAnswers
from ..targets.batches import Batches
from ..targets.target import Target
from ..targets.teacher_forcing import Rows
from ..training.run import check_writer
from .acceptance import Acceptance
from .draft_measures import Measured, MeasuredRows, MeasuredSkipped, MeasuredTexts, open_measured
from .quality import Score, Told, open_task
from .ranking import rank_choices
from .skipped import known
from .speed import Machine, bound

BATCH = 64
"""Records that go through the target together."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Evaluation:
    """`drafts` by the name that was asked for, and what the target's own answers are worth (None where nobody asked, or
    nothing judges such records)."""

    drafts: Mapping[str, Acceptance]
    score: Score | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    """The target's answers by key; none where nothing read them."""


def evaluate(
    target: Target,
    records: RecordSet,
    drafts: Sequence[str],
    draft_length: int = 5,
    max_new_tokens: int | None = 96,
    task: str | None = None,
    machine: Machine | None = None,
    report: Report | None = None,
    texts: bool = True,
    batch_size: int = BATCH,
) -> Evaluation:
    """What `evaluate_drafts` finds, and what the answers are worth by `task`, a name of `quality`. The target answers
    once, for both.

    Args:
        task: None judges nothing. machine: by whose pass times speed-ups are predicted.
        texts: whether the answers are wanted where nothing else needs them: a task that ranks reads none.
        batch_size: records, or choices of one, that go through the target together; halved where a GPU's memory runs out.

    Raises:
        OptionError: as `evaluate_drafts`; an unknown task; a task beside texts that are not the target's own.
    """
    say = report or (lambda line: None)
    judge = None if task is None else open_task(task)
    if judge is not None and max_new_tokens is None:
        raise OptionError("--task judges the target's own answers; leave --given-text out")
    opened = {name: open_measured(target, name, draft_length) for name in drafts}
    check_writer(target, records)
    read = texts or bool(drafts) or judge is None or not judge.RANKS
    if max_new_tokens is not None and read:
        records = answered(target, records, max_new_tokens, say, batch_size)
    acceptances = _measured(target, records, opened, say, machine, batch_size)
    if judge is None:
        return Evaluation(acceptances)
    ranks: Sequence[int | None] = (
        rank_choices(target, records.records, say, batch_size) if judge.RANKS else [None] * len(records)
    )
    answers = TorchAnswers(target)
    said = [answers.text(record.tokens or ()) for record in records]
    told = [Told(*each) for each in zip(records, said, ranks, strict=True)]
    return Evaluation(
        acceptances, judge.score(told), {one.record.key: one.text for one in told} if read else {}
    )


def evaluate_drafts(
    target: Target,
    records: RecordSet,
    drafts: Sequence[str],
    draft_length: int = 5,
    max_new_tokens: int | None = 96,
    report: Report | None = None,
    machine: Machine | None = None,
) -> dict[str, Acceptance]:
    """Acceptance by draft name; the target answers once for all drafts, and reads its answers once for each kind of them.

    Args:
        drafts: draft folders, or `KIND@N` of an untrained kind, such as `early-exit@3`.
        max_new_tokens: the target first answers the records greedily, up to this limit, unless they are its own
            generations already; None teacher-forces the records' own texts.
        report: receives a line now and then. machine: by whose pass times speed-ups are predicted.

    Raises:
        ExportError: a draft belongs to another target. OptionError: a name that is no such draft, or a layer that the
            target has not.
    """
    return dict(evaluate(target, records, drafts, draft_length, max_new_tokens, None, machine, report).drafts)


@torch.no_grad()
def _measured(
    target: Target,
    records: RecordSet,
    drafts: Mapping[str, Measured],
    say: Report,
    machine: Machine | None,
    batch_size: int,
) -> dict[str, Acceptance]:
    """The figures of every draft over the records. The target reads them once for drafts that look at single hidden states, once for those
    that look at whole texts, and once, each by itself, for its own self without sublayers."""
    by_row = [measured for measured in drafts.values() if isinstance(measured, MeasuredRows)]
    by_text = [measured for measured in drafts.values() if isinstance(measured, MeasuredTexts)]
    by_record = [measured for measured in drafts.values() if isinstance(measured, MeasuredSkipped)]
    layers = sorted({measured.layer for measured in by_row})
    taps = sorted({tap for measured in by_text for tap in measured.taps})

    def measure(chunk: Sequence[Record]) -> None:
        with ExitStack() as counts:
            for measured in drafts.values():
                counts.enter_context(measured.whole())
            if by_row:
                _add_rows(target, by_row, *target.rows(chunk, layers))
            if by_text:
                texts = target.texts(chunk, taps)
                for measured in by_text:
                    measured.add(texts)
            for record in chunk if by_record else ():
                text = known(target, record)
                for measured in by_record:
                    measured.add(text)

    if drafts:
        say(f"measuring {len(drafts)} draft(s) on {len(records)} answers, {placed(target.device)}")
    for places, _ in Batches(batch_size, say).over(records.records if drafts else [], measure):
        say(f"measured {places.stop}/{len(records)} answers")
    return {name: _with_speed(target, measured, machine) for name, measured in drafts.items()}


def _with_speed(target: Target, measured: Measured, machine: Machine | None) -> Acceptance:
    """The figures with what they are worth in speed."""
    result, cycles = measured.result(), measured.cycles
    if not cycles.cycles:
        return result
    predicted = None if machine is None else machine.speedup(measured.name, result.draft_length, cycles)
    most = bound(result.tau, result.proposed / result.cycles, measured.layers / target.num_layers)
    return replace(result, bound=most, speedup=predicted)


def _add_rows(target: Target, drafts: Sequence[MeasuredRows], batch: Rows, trunks: dict[int, Tensor]) -> None:
    if len(batch):
        own = target.head(batch.residuals[:, -1])
        for measured in drafts:
            measured.add(trunks[measured.layer], own, batch)


def answered(
    target: Target, records: RecordSet, max_new_tokens: int, report: Report, batch_size: int = BATCH
) -> RecordSet:
    """The records with the target's own greedy answers; those that have tokens already keep them."""
    answers, options = TorchAnswers(target, batch_size, report), GenerationOptions(max_new_tokens)
    open_ = [i for i, record in enumerate(records) if record.tokens is None]
    if open_:
        report(f"answering {len(open_)} records, {max_new_tokens} tokens at most, {placed(target.device)}")
    told, cut = list(records), 0
    for done, (place, outcome) in enumerate(answers.answer([records[i] for i in open_], options), 1):
        if isinstance(outcome, InputError):
            raise outcome
        (answer,), index = outcome, open_[place]
        told[index] = replace(records[index], tokens=answer)
        cut += answers.is_cut(answer)
        if done % batch_size == 0 or done == len(open_):
            report(f"answered {done}/{len(open_)} records")
    if cut:
        report(f"{cut} of {len(open_)} answers were cut at --max-new-tokens {max_new_tokens}")
    return replace(records, records=told)


def placed(device: torch.device) -> str:
    """Where the target runs: `on cuda:0`, or `on cpu with 1 thread`."""
    threads = torch.get_num_threads()
    return f"on {device}" + (f" with {threads} thread{'s' * (threads != 1)}" if device.type == "cpu" else "")
