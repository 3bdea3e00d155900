"""`vlmexport generate-data`: answers of a target in JSONL shards, each written atomically.

A killed run is continued by the same command: shards that exist are kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...exporter.common.write_errors import explain_write_errors
from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.errors import InputError, OptionError
from ...runtime.common.locks import only_one
from ...runtime.common.parts import Part
from ..common.provenance import provenance
from ..data.generated import META, PLACE, WHOLE, read_meta, shard_name
from ..data.reading.records import Problems, Record, RecordSet
from .answers import Answers, GenerationOptions

LOCK = ".lock"
"""A file of the folder while a process writes there."""


@dataclass(frozen=True)
class Generated:
    """What one call did: shards of the whole or of the part, shards that it wrote (the others were there), and for these the records
    that could not be answered, the answers, how many of them the limit cut, their tokens, the seconds, and how many answers
    were too short and are not among them."""

    shards: int
    written: int
    skipped: int
    answers: int
    cut: int
    tokens: int
    seconds: float
    short: int = 0


def generate_data(
    answers: Answers,
    records: RecordSet,
    out: Path,
    options: GenerationOptions | None = None,
    shard_size: int = 256,
    strict: bool = False,
    report: Callable[[str], None] | None = None,
    part: Part | None = None,
) -> Generated:
    """Answers every record, or those of a part; returns what this call wrote. One process at a time writes to a folder.

    Args:
        answers: who answers. records: what to; their own texts are ignored.
        out: folder for `generated.json` and `shard-*.jsonl`.
        options: limit and sampling. shard_size: records per shard.
        strict: raise at a record that cannot be answered (an unreadable picture, a prompt that is too long) in place
        of skipping it.
        part: the records to answer, by their keys; `join_parts` makes of all parts what one run without parts writes.

    Raises:
        OptionError: `out` holds generations of another target, data or options, or another process writes to it.
        InputError: a bad record, when strict; a shard without any answer before there are others.
    """
    options = options or GenerationOptions()
    with explain_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    with explain_write_errors(out), only_one(out / LOCK, kept=False):
        say = report or (lambda line: print(line, file=sys.stderr, flush=True))
        own = [i for i, record in enumerate(records) if part is None or part.holds(record.key)]
        shards = -(-len(own) // shard_size)
        run: dict[str, Any] = {
            "target": {"name": answers.name, "fingerprint": answers.fingerprint},
            "data": records.name,
            "identity": records.identity(),
            "max_new_tokens": options.max_new_tokens,
            "sampling": options.sampling(),
            "min_answer": options.min_answer or None,
            "engine": answers.engine,
            "shard_size": shard_size,
            "part": None if part is None else str(part),
            "shards": shards,
        }
        if part is not None:
            run[WHOLE] = {"records": len(records), "shards": -(-len(records) // shard_size)}
        _claim(out, run)
        missing = [n for n in range(shards) if not (out / shard_name(n)).exists()]
        problems, clock, tokens, written, cut = Problems(strict), time.perf_counter(), 0, 0, 0
        lengths: list[int] = []  # of answers that are too short
        places = [(n, i) for n in missing for i in own[n * shard_size : (n + 1) * shard_size]]
        begun = len(missing) < shards
        left = Counter(number for number, _ in places)
        lines: dict[int, dict[int, list[str]]] = {number: {} for number in missing}
        done = 0
        with closing(answers.answer([records[i] for _, i in places], options)) as outcomes:
            for place, outcome in outcomes:
                number, index = places[place]
                record = records[index]
                if isinstance(outcome, InputError):
                    where = f"record {record.key}"
                    problems.report(where, str(outcome).removeprefix(f"{where}: "))
                    outcome = []
                kept = [pair for pair in enumerate(outcome) if len(pair[1]) >= options.min_answer]
                lengths += [len(answer) for answer in outcome if len(answer) < options.min_answer]
                tokens += sum(len(answer) for _, answer in kept)
                written += len(kept)
                cut += sum(answers.is_cut(answer) for _, answer in kept)
                place_in_whole = {} if part is None else {PLACE: index}
                lines[number][index] = [
                    json.dumps(_line(answers, record, sample, answer) | place_in_whole) + "\n"
                    for sample, answer in kept
                ]
                left[number] -= 1
                if left[number]:
                    continue
                few = part is not None and len(own) < shard_size  # may be bad where the other parts are not
                if not written and not begun and not few:  # not a bad record: a mistake in all of them
                    raise InputError(_nothing_written(problems, lengths, options))
                shard = lines.pop(number)
                _write(out / shard_name(number), "".join(line for i in sorted(shard) for line in shard[i]))
                done += 1
                spent = time.perf_counter() - clock
                rest = spent / done * (len(missing) - done)
                say(f"shard {number + 1}/{shards}  {tokens / spent:,.0f} tokens/s  {rest:.0f} s left")
        if problems.lines:
            say(f"{len(problems.lines)} record(s) were skipped")
        if lengths:
            say(f"{len(lengths)} answers of fewer than {options.min_answer} tokens were left out")
        if cut:
            say(f"{cut} of {written} answers were cut at --max-new-tokens {options.max_new_tokens}")
        return Generated(
            shards,
            len(missing),
            len(problems.lines),
            written,
            cut,
            tokens,
            round(time.perf_counter() - clock, 2),
            len(lengths),
        )


def _nothing_written(problems: Problems, lengths: list[int], options: GenerationOptions) -> str:
    """Why there is no answer among the first records; `lengths` are those of answers that are too short."""
    if lengths:
        return (
            f"none of the first {len(lengths)} answer(s) has {options.min_answer} tokens (--min-answer), the longest has "
            f"{max(lengths)}; ask for more with --prompt-suffix, or lower it"
        )
    return f"none of the first {len(problems.lines)} record(s) can be answered; {problems.lines[0]}"


def _claim(out: Path, run: dict[str, Any]) -> None:
    """Makes the folder `run`'s own. OptionError when it holds generations of another one."""
    meta = out / META
    # A run that failed before its first shard claims nothing.
    if meta.exists() and any(out.glob("shard-*.jsonl")):
        stored = read_meta(out)
        for name, value in run.items():
            if stored.get(name) != value:
                raise OptionError(
                    f"{out} holds generations with {name} = {stored.get(name)!r}, not {value!r}; give another -o"
                )
    else:
        _write(meta, json.dumps(run | {"provenance": provenance()}, indent=1) + "\n")


def _line(answers: Answers, record: Record, sample: int, answer: tuple[int, ...]) -> dict[str, Any]:
    return {
        "key": f"{record.key}#{sample}" if sample else record.key,
        "prompt": record.prompt,
        "image": record.image.absolute().to_json() if record.image else None,
        "tokens": list(answer),
        "text": answers.text(answer),
        **({"history": [list(turn) for turn in record.history]} if record.history else {}),
    }


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as out:
        out.write(text.encode())
