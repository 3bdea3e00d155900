"""What `vlmexport build` reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel


class GraphReport(BaseModel):
    """One written graph."""

    name: str
    role: str
    nodes: int
    bytes: int


class BuildReport(BaseModel):
    """What was built. `bytes` is the whole bundle, `linked_bytes` what of it are files of the checkpoint; `parameters`
    counts the target's numbers."""

    status: Literal["built"] = "built"
    output: Path
    model: str
    family: str
    cuts: list[int]
    drafts: list[str]
    draft_precisions: dict[str, str]
    """Drafts whose matrices are stored as integers → their type."""
    speculative: bool
    parameters: int
    draft_parameters: int
    weight_bytes: int
    linked_bytes: int
    bytes: int
    graphs: list[GraphReport]
    parity: list[dict[str, Any]]
    plans: list[dict[str, Any]]
    notices: list[str]
    seconds: float
    stages: dict[str, float]
    """Seconds by stage: checks, fingerprint (with the download of a hub model), graphs, files, parity, plans, checksums."""
