"""`vlmexport generate-data`: answers of a target in JSONL shards, each written atomically.

A killed run is continued by the same command: shards that exist are kept.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...runtime.errors import ImageError, OptionError
from ..data.generated import META, shard_name
from ..data.records import Problems, Record, RecordSet
from ..training.provenance import provenance
from .answers import Answers, GenerationOptions


def generate_data(
    answers: Answers,
    records: RecordSet,
    out: Path,
    options: GenerationOptions | None = None,
    shard_size: int = 256,
    batch_size: int = 128,
    strict: bool = False,
    report: Callable[[str], None] | None = None,
) -> int:
    """Answers every record; returns how many shards this call wrote.

    Args:
        answers: who answers. records: what to; their own texts are ignored.
        out: folder for `generated.json` and `shard-*.jsonl`.
        options: limit and sampling. shard_size: records per shard. batch_size: records per pass.
        strict: raise at an unreadable image in place of skipping it.

    Raises:
        OptionError: `out` holds generations of another target, data or options.
    """
    options = options or GenerationOptions()
    say = report or (lambda line: print(line, file=sys.stderr, flush=True))
    shards = -(-len(records) // shard_size)
    run: dict[str, Any] = {
        "target": {"name": answers.name, "fingerprint": answers.fingerprint},
        "data": records.name,
        "identity": records.identity(),
        "max_new_tokens": options.max_new_tokens,
        "sampling": options.sampling(),
        "shard_size": shard_size,
        "shards": shards,
    }
    out.mkdir(parents=True, exist_ok=True)
    meta = out / META
    # A run that failed before its first shard claims nothing.
    if meta.exists() and any(out.glob("shard-*.jsonl")):
        stored = json.loads(meta.read_text("utf-8"))
        for name, value in run.items():
            if stored.get(name) != value:
                raise OptionError(
                    f"{out} holds generations with {name} = {stored.get(name)!r}, not {value!r}; give another -o"
                )
    else:
        _write(meta, json.dumps(run | {"provenance": provenance()}, indent=1) + "\n")
    missing = [n for n in range(shards) if not (out / shard_name(n)).exists()]
    problems, clock, tokens, written, cut = Problems(strict), time.perf_counter(), 0, 0, 0
    for done, number in enumerate(missing, 1):
        lines = []
        chunk = records[number * shard_size : (number + 1) * shard_size]
        for at in range(0, len(chunk), batch_size):
            for record, found in _answers(answers, chunk[at : at + batch_size], options, problems):
                for sample, answer in enumerate(found):
                    tokens += len(answer)
                    written += 1
                    cut += answers.is_cut(answer)
                    lines.append(json.dumps(_line(answers, record, sample, answer)))
        _write(out / shard_name(number), "".join(line + "\n" for line in lines))
        spent = time.perf_counter() - clock
        left = spent / done * (len(missing) - done)
        say(f"shard {number + 1}/{shards}  {tokens / spent:,.0f} tokens/s  {left:.0f} s left")
    if problems.found:
        say(f"{len(problems.found)} record(s) were skipped")
    if cut:
        say(f"{cut} of {written} answers were cut at --max-new-tokens {options.max_new_tokens}")
    return len(missing)


def _answers(
    answers: Answers, chunk: list[Record], options: GenerationOptions, problems: Problems
) -> list[tuple[Record, list[tuple[int, ...]]]]:
    try:
        return list(zip(chunk, answers.answer(chunk, options), strict=True))
    except ImageError:
        readable = []
        for record in chunk:
            try:
                if record.image is not None:
                    record.image.load()
                readable.append(record)
            except ImageError as error:
                problems.report(f"record {record.key}", str(error))
        if len(readable) == len(chunk):
            raise
        return list(zip(readable, answers.answer(readable, options), strict=True)) if readable else []


def _line(answers: Answers, record: Record, sample: int, answer: tuple[int, ...]) -> dict[str, Any]:
    return {
        "key": f"{record.key}#{sample}" if sample else record.key,
        "prompt": record.prompt,
        "image": record.image.absolute().to_json() if record.image else None,
        "tokens": list(answer),
        "text": answers.text(answer),
    }


def _write(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, "utf-8")
    scratch.replace(path)
