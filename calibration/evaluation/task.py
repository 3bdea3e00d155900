"""Which score judges a target's answers, known before anything expensive: nothing here needs torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from ...runtime.common.errors import OptionError
from ...runtime.common.optional_deps import need_extra
from ..data.reading.records import Record, RecordSet
from .quality import names, open_task

PEOPLE = 10
"""Answers to a question of VQA."""

SHORT = 5
"""Words of an answer that is compared as a whole; longer ones are judged as captions."""


def chosen_task(
    asked: str, records: RecordSet, drafts: bool, answers: Path | None, say: Callable[[str], None]
) -> str | None:
    """The task that `--task` means; None where nothing is to be judged. Where drafts are measured, a score that these records
    cannot have is no error: a line says that it is left out.

    Raises OptionError for an unknown task, for one whose packages are not here, and where there is nothing to do.
    """
    task = None if asked in ("none", "auto") else asked
    if task is not None:
        open_task(task)
        if task == "captions":
            need_extra("captions", "--task captions")
    problem = None
    if asked == "auto":
        task, problem = _fitting(records)
    elif task is not None and not any(map(_judged_by(task), records)):
        problem = f"--task {task}: {_nothing_to_judge(task, records)}"
    if problem is not None and not drafts:
        raise OptionError(f"{problem}, and there is no --draft to measure")
    if task is None and answers is not None:
        why = f" ({problem})" if problem else "; give --task"
        raise OptionError(f"--answers {answers}: answers are written where they are judged{why}")
    if task is None and not drafts:
        raise OptionError("nothing to measure; give --draft, or --task to judge the answers")
    if problem is not None:
        say(f"{problem}: the score is left out, the drafts are measured")
    elif asked == "auto" and records.task is None:
        say(f"--task auto: {task}, by the answers of {records.name}")
    return task


def _fitting(records: RecordSet) -> tuple[str | None, str | None]:
    """What `auto` takes, or why it takes nothing."""
    if records.mixed:
        return (
            None,
            f"--task auto: {records.name} are judged by different scores; give one of {', '.join(names())}",
        )
    task = records.task or fitting_task(records)
    if task is None or not any(map(_judged_by(task), records)):
        return None, f"--task auto: {_nothing_to_judge(task or 'exact', records)}"
    if task == "captions":
        try:
            need_extra("captions", "--task auto: captions")
        except OptionError as error:
            return None, str(error)
    return task, None


def fitting_task(records: Sequence[Record]) -> str | None:
    """The task of records that nobody named one for: choices are ranked; answers of many people are VQA's, other short ones are
    compared as a whole, and long ones are captions. None where nothing says what is right."""
    if any(map(_judged_by("choices"), records)):
        return "choices"
    right = [record.references for record in records if record.references]
    if not right:
        return None
    if median(len(text.split()) for texts in right for text in texts) > SHORT:
        return "captions"
    return "vqa" if median(map(len, right)) >= PEOPLE else "exact"


def _judged_by(task: str) -> Callable[[Record], bool]:
    """Whether a task can judge a record's answer."""
    if task == "choices":
        return lambda record: bool(record.choices) and record.choice is not None
    return lambda record: bool(record.references)


def _nothing_to_judge(task: str, records: RecordSet) -> str:
    if task == "choices":
        return f"no record of {records.name} has choices of which one is right (fields:…,choices=FIELD,choice=FIELD)"
    return f"no record of {records.name} has an answer to judge by (in JSONL `answer` or `answers`, else fields:…,answer=FIELD)"
