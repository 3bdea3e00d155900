"""A target's own greedy answers to several sets of data, in one folder; those that are there are kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.engine import open_answers
from vlmexport.calibration.generation.generate import generate_data


def own_answers(
    model: str, sets: Mapping[str, str], folder: Path, longest: int, threads: int
) -> list[RecordSet]:
    """The answers to each of `sets`, data by the name of its folder below `folder`; of `longest` tokens at most."""
    writer = open_answers(model, "runtime", "cpu", None, longest, None, threads, print)
    for name, data in sets.items():
        generate_data(writer, load_records(data), folder / name, GenerationOptions(longest))
    return [load_records(str(folder / name)) for name in sets]
