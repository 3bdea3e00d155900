"""A build request that is checked, before anything is traced or written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...runtime.bundle.manifest import Manifest
from ..checkpoint import Checkpoint
from ..drafts.selection import DraftSelection
from ..families.common.base import Family
from .generation import generation_notices
from .request import BuildRequest

if TYPE_CHECKING:
    from ..tensorrt import PlanOptions


@dataclass
class Prepared:
    """A checked request. `manifest` has everything but graphs, tensors, weights, parity, plans and files."""

    request: BuildRequest
    checkpoint: Checkpoint
    family: Family
    selection: DraftSelection
    manifest: Manifest
    plans: PlanOptions | None

    @property
    def cuts(self) -> list[int]:
        """Where the decoder is cut."""
        return self.manifest.decoder.cuts

    @property
    def notices(self) -> list[str]:
        """Lines for the user."""
        return [
            *self.checkpoint.notices,
            *self.selection.notices,
            *generation_notices(self.manifest.generation.to_dict()),
        ]
