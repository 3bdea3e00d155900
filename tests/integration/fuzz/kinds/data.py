"""Damaged training data: JSONL files of records, read whole, pictures included."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.integration.fuzz.cases import Case
from tests.integration.fuzz.mutate import json_text, mutate_bytes, mutate_json

from .base import call, picture


class Seeds:
    """Records as users write them."""

    def __init__(self, folder: Path):
        self._picture = picture(folder / "picture.png")
        self._records: list[dict[str, Any]] = [
            {"image": str(self._picture), "prompt": "what is this?", "answer": "a red cup"},
            {"prompt": "a red", "answer": "cup"},
            {"messages": [{"role": "user", "content": "a red"}, {"role": "assistant", "content": "cup"}]},
        ]

    def make(self, rng: random.Random, folder: Path) -> Case:
        lines = [json.dumps(rng.choice(self._records)).encode() for _ in range(rng.randrange(1, 6))]
        at = rng.randrange(len(lines))
        if rng.random() < 0.75:
            lines[at] = json_text(mutate_json(rng.choice(self._records), rng), rng)
        whole = b"\n".join(lines) + b"\n"
        if rng.random() < 0.4:
            whole = mutate_bytes(whole, rng)
        path = folder / "data.jsonl"
        path.write_bytes(whole)
        strict = rng.random() < 0.3

        def read() -> None:
            from vlmexport.calibration.data import load_records

            for record in load_records(str(path), strict=strict).records:
                if record.image is not None:
                    record.image.load()

        return Case(call(read), one_line=False)  # bad records are listed


def prepare(folder: Path) -> Seeds:
    """Records as users write them."""
    return Seeds(folder)
