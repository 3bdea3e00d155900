"""The JSON of `train`, `search` and `generate-data` (schemas: `schemas/train-1.json`, `schemas/search-1.json`,
`schemas/generate-data-1.json`)."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..exporter.drafts.common.base import Draft
from ..exporter.drafts.common.files import MODEL, read_document
from ..runtime.common.parts import Part
from .data.reading.records import RecordSet
from .generation.answers import Answers
from .generation.generate import Generated
from .targets.target import Target


def training_report(
    target: Target,
    records: RecordSet,
    validation: RecordSet | None,
    draft: Draft,
    folder: Path,
    steps: int,
    seconds: float,
) -> dict[str, Any]:
    """Of a run that has come to its last step; `draft` is the best one, in `folder`. `validation` is null where a part
    of the records was kept for it, and `seconds` are those of this call: a continued run took longer. `model` is the
    changed target, null where it did not change."""
    document = read_document(folder)
    changed = {"folder": str(folder / MODEL), "fingerprint": document["target"]["fingerprint"]}
    return {
        "schema_version": 1,
        "status": "trained",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "draft": {"name": draft.name, "fingerprint": draft.fingerprint, "folder": str(folder)},
        "model": None if draft.trained_from is None else changed,
        "records": _records(records),
        "validation": None if validation is None else _records(validation),
        "steps": steps,
        "best": document.get("evaluation") or {},
        "seconds": seconds,
    }


def search_report(
    target: Target, records: RecordSet, held: RecordSet | None, draft: Draft, folder: Path
) -> dict[str, Any]:
    """Of a search that is complete; its draft is in `folder`. `validation` is null where a part of the records was kept for
    it. `searched` and `held_out` are the counts on the answers that chose the draft, and on the others."""
    document = read_document(folder)
    return {
        "schema_version": 1,
        "status": "searched",
        "target": {"name": target.name, "fingerprint": target.fingerprint},
        "draft": {"name": draft.name, "fingerprint": draft.fingerprint, "folder": str(folder)},
        "records": _records(records),
        "validation": None if held is None else _records(held),
        "found": document["network"],
        **document["evaluation"],
    }


def generation_report(
    answers: Answers, records: RecordSet, out: Path, generated: Generated, part: Part | None = None
) -> dict[str, Any]:
    """Of data, or of a part of it, that is complete; the counts but `records` and `shards` are those of this call."""
    return {
        "schema_version": 1,
        "status": "generated",
        "target": {"name": answers.name, "fingerprint": answers.fingerprint},
        "engine": answers.engine,
        "output": str(out),
        "part": None if part is None else str(part),
        "records": _records(records),
        **asdict(generated),
    }


def _records(records: RecordSet) -> dict[str, Any]:
    return {"data": records.name, "count": len(records), "bad": len(records.problems)}
