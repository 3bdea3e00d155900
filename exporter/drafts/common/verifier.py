"""The target of a draft that others publish or read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....runtime.common.errors import ExportError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Verifier:
    """What a checkpoint says of its target: `name` is a hub id or a folder, `positions` how many it was made for (None: it does
    not say). `lm_head` reads its LM head [V, E], where its weights are here."""

    name: str | None
    architectures: tuple[str, ...]
    positions: int | None = None
    lm_head: Callable[[], Tensor] | None = None

    def read_lm_head(self) -> Tensor:
        """The LM head. Raises ExportError where it is not on this machine."""
        if self.lm_head is None:
            raise ExportError(
                f"this draft shares the LM head of {self.name}, which its checkpoint repeats, and its weights are not here; "
                "download the model, and give its folder with --model"
            )
        return self.lm_head()
