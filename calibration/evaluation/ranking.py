"""Where a target ranks the right one of a record's choices, by the log-probability of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..data.records import Record
from ..targets.target import Target

_BATCH = 50


@torch.no_grad()
def log_probabilities(target: Target, record: Record, texts: Sequence[str]) -> list[float]:
    """Σ log p of every token of each text and of the end behind it, given the record's picture and turns."""
    found: list[float] = []
    for at in range(0, len(texts), _BATCH):
        told = [replace(record, answer=text, tokens=None) for text in texts[at : at + _BATCH]]
        rows, _ = target.rows(told, [target.num_layers], first=True)
        said = (
            target.head(rows.residuals[:, -1]).float().log_softmax(-1).gather(1, rows.tokens[:, None])[:, 0]
        )
        sums = torch.zeros(len(told), dtype=torch.float64, device=said.device)
        found += sums.index_add_(0, rows.records, said.double()).tolist()
    return found


def right_rank(values: Sequence[float], choice: int) -> int:
    """Place of `choice` from 1, the highest value first; of equals the earlier one comes first."""
    own = values[choice]
    return 1 + sum(value > own or (value == own and at < choice) for at, value in enumerate(values))


def rank_choices(
    target: Target, records: Sequence[Record], report: Callable[[str], None] = lambda line: None
) -> list[int | None]:
    """Per record the rank of its right choice, None where it has no choices or none is right."""
    ranks: list[int | None] = []
    for number, record in enumerate(records, 1):
        ranked = record.choices and record.choice is not None
        ranks.append(
            right_rank(log_probabilities(target, record, record.choices), record.choice)  # type: ignore[arg-type]
            if ranked else None
        )  # fmt: skip
        if number % _BATCH == 0 or number == len(records):
            report(f"ranked the choices of {number}/{len(records)} records")
    return ranks
