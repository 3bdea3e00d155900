"""The target that a published draft names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verifier:
    """What a checkpoint of speculators says of its target: `name` is a hub id or a folder, `positions` how many it was made for (None:
    it does not say)."""

    name: str | None
    architectures: tuple[str, ...]
    positions: int | None = None
