"""What every layout is: how a method of quantization stores matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from .matrix import Headers, StoredMatrix


@dataclass(frozen=True, kw_only=True)
class Layout(ABC):
    """A method as one checkpoint's configuration describes it.

    `identity`: what of the configuration changes the numbers that the same tensors mean; `notices`: lines for the user about
    what the checkpoint asks for beside its weights, and the model does without; `beside`: last parts of the names of tensors
    that serve only that.
    """

    identity: str
    notices: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @abstractmethod
    def matrices(self, headers: Headers) -> list[StoredMatrix]:
        """Every matrix that the checkpoint stores so. Raises ExportError where tensors miss or do not fit."""
