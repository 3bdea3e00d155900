"""What a task is given, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...data.reading.records import Record


@dataclass(frozen=True)
class Told:
    """A record, the target's greedy answer as text, and, where it was ranked, the place of the right choice from 1."""

    record: Record
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Score:
    """Figures by name, over `count` of the `total` records; `left_out` says which figures are missing, and why, and
    `notes` what else a reader must know."""

    task: str
    count: int
    total: int
    values: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "notes": list(self.notes)}
