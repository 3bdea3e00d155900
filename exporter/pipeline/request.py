"""What `vlmexport build` is asked for, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...runtime.common.errors import OptionError
from ..common.precisions import precision_name
from ..families.common.layer_skip import Sublayers

TEXT, ROUND = 512, 64
"""Positions of text that a bundle holds unasked, and what its length is rounded up to."""

Progress = Callable[..., None]
"""`progress(stage, done, total)`; stages are graphs, checks, parity, plans (counts), weights and checksums (bytes). Of plans
the fourth argument is the graph whose plan is next, "" behind the last."""

RANGES = {
    "max_length": (2, 1 << 20),
    "max_batch": (1, 1024),
    "max_width": (2, 1024),
    "verify_width": (2, 1024),
    "max_source": (1, 1 << 20),
    "max_pixels": (1, 1 << 32),
}


class BuildRequest(BaseModel):
    """What to build. Lengths are in tokens; `max_length` None is `TEXT` and room for a picture, as far as the model's
    positions go. `skip_attention` and `skip_mlp` are layers, from 0, that a draft leaves out. `draft_precision` is as `drafts.selection.set_precisions` takes it. `link_weights` leaves the checkpoint's tensors in its own files. `parity_memory` is in bytes, None follows the memory that is available."""

    model_config = ConfigDict(extra="forbid")

    model: str
    output: Path
    adapter: str | None = None
    """Merged into the model: a folder or hub id; `none` leaves one beside the model's weights out."""
    draft_layer: int | None = None
    drafts: list[str] = Field(default_factory=list)
    skip_attention: list[int] | None = None
    skip_mlp: list[int] | None = None
    draft_precision: list[str] = Field(default_factory=list)
    max_length: int | None = None
    max_batch: int = 16
    max_width: int = 16
    verify_width: int | None = None
    max_source: int = 512
    max_pixels: int | None = None
    precision: str = "float32"
    link_weights: bool = False
    default_prompt: str | None = None
    force: bool = False
    parity: bool = True
    parity_memory: int | None = None
    backend: str | None = None
    target: str = "sm86"
    plan_precision: str = "auto"
    lowering: str = "auto"

    @property
    def skip(self) -> Sublayers | None:
        """What a draft is to leave out of the target. OptionError for what names no layers."""
        if self.skip_attention is None and self.skip_mlp is None:
            return None
        return Sublayers.of(self.skip_attention or [], self.skip_mlp or [])

    @property
    def length(self) -> int:
        """`max_length`, which `prepare` fills in."""
        assert self.max_length is not None, "of a prepared request"
        return self.max_length

    def check(self) -> None:
        """Gives `precision` its full name; OptionError for a value that no model could be built with."""
        self.precision = precision_name(self.precision)
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise OptionError(f"--{name.replace('_', '-')} {value} is out of range {low}..{high}")
        if self.skip_attention is not None or self.skip_mlp is not None:
            Sublayers.of(self.skip_attention or [], self.skip_mlp or [])  # refuses what names no layers
        if self.verify_width is not None and self.verify_width > self.max_width:
            raise OptionError(
                f"--verify-width {self.verify_width} is above --max-width {self.max_width}; no pass is wider than that"
            )


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
