"""What `vlmexport eval` prints: a table for people, JSON (schema: `schemas/eval-1.json`), and the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...runtime.commands.table import Table
from ...runtime.common.atomic_files import atomic_write
from ..data.reading.records import RecordSet
from .acceptance import Acceptance
from .run import Evaluation


def document(evaluation: Evaluation, model: str, data: Sequence[str], machine: str | None) -> dict[str, Any]:
    """One JSON object."""
    return {
        "schema_version": 1,
        "model": model,
        "data": list(data) if len(data) > 1 else data[0],
        "drafts": {name: result.to_dict() for name, result in evaluation.drafts.items()},
        "score": None if evaluation.score is None else evaluation.score.to_dict(),
        "machine": machine,
    }


def table(evaluation: Evaluation) -> Iterator[str]:
    """Lines for people."""
    if evaluation.drafts:
        yield from drafts_table(evaluation.drafts).printed()
    score = evaluation.score
    if score is None:
        return
    if evaluation.drafts:
        yield ""
    yield f"{score.task}, {score.count} of {score.total} answers (the target's own: no draft changes them)"
    for name, value in score.values.items():
        yield f"  {name:20} {value:8.3f}"
    for name, reason in score.left_out.items():
        yield f"  {name:20} left out: {reason}"
    for note in score.notes:
        yield f"  note: {note}"


def write_answers(evaluation: Evaluation, records: RecordSet, path: Path) -> None:
    """A line per record: key, prompt, answer, references."""
    with atomic_write(path) as out:
        for record in records:
            line = {"key": record.key, "prompt": record.prompt, "answer": evaluation.texts[record.key]}
            out.write((json.dumps({**line, "references": list(record.references)}) + "\n").encode())


def drafts_table(drafts: Mapping[str, Acceptance]) -> Table:
    """A row for every draft."""
    table = Table()
    table.add_column("draft", wrap=True)
    for name in ("alpha", "tau", "agreement", "Σmin(p,q)", "bound", "speed-up"):
        table.add_column(name, justify="right")
    for name, r in drafts.items():
        table.add_row(
            name, f"{r.alpha:.4f}", f"{r.tau:.3f}", f"{r.agreement:.4f}", f"{r.overlap:.4f}", _times(r.bound),
            _times(r.speedup),
        )  # fmt: skip
    return table


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×"
