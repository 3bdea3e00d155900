"""A draft's own tensors as a source of a bundle's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


class DraftTensors:
    """Tensors under names that cannot collide with the target's: `draft.` and the draft's name before each."""

    PREFIX = "draft."

    def __init__(self, draft: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.prefix = f"{self.PREFIX}{draft}."
        self._tensors = {self.prefix + k: v.detach() for k, v in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def order(self, name: str) -> tuple[int, int]:
        """After every shard of the target."""
        return 1_000_000, list(self._tensors).index(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, float32."""
        return self._tensors[name]
