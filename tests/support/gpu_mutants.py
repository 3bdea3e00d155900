"""Errors of what the engines on a GPU share, planted in the real code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.engines.base import Buffer, View
from vlmexport.runtime.engines.device import DeviceEngine, _Captured

Patch = pytest.MonkeyPatch


def missing_synchronisation(patch: Patch) -> None:
    """Results are fetched while the work is still in the stream."""
    patch.setattr(DeviceEngine, "synchronise", lambda self: None)


def wait_forgotten(patch: Patch) -> None:
    """What a program brings back is read before it is there."""
    patch.setattr(_Captured, "wait", lambda self: None)


def staging_memory_reused(patch: Patch) -> None:
    """Every transfer goes through the same page-locked bytes."""
    place = DeviceEngine._place

    def wrong(self: Any, nbytes: int) -> np.ndarray:
        self._staged = 0
        return place(self, nbytes)

    patch.setattr(DeviceEngine, "_place", wrong)


def upload_reused(patch: Patch) -> None:
    """The host prepares the next cycle in memory that the device has not fetched yet."""
    launch = _Captured.launch

    def wrong(self: Any) -> None:
        launch(self)
        self.upload[:8] ^= 1

    patch.setattr(_Captured, "launch", wrong)


def updated_cache_elsewhere(patch: Patch, engine: type[DeviceEngine]) -> None:
    """An updated cache is bound to memory of its own."""
    bind = engine._bind

    def wrong(self: Any, graph: str, inputs: Mapping[str, View], outputs: Mapping[str, View]) -> Any:
        moved = {
            name: self.allocate(name, view.nbytes, True).view(view.shape, view.dtype)
            if name.startswith("updated_value_cache.")
            else view
            for name, view in outputs.items()
        }
        return bind(self, graph, inputs, moved)

    patch.setattr(engine, "_bind", wrong)


def memory_too_small(patch: Patch) -> None:
    """Masks get less memory than the engine says they have."""
    allocate = DeviceEngine.allocate

    def wrong(self: Any, name: str, nbytes: int, zeroed: bool = False) -> Buffer:
        if name != "attn_mask":
            return allocate(self, name, nbytes, zeroed)
        small = allocate(self, name, nbytes // 64)
        self.small_masks = [*getattr(self, "small_masks", ()), small]  # for as long as the engine
        return Buffer(name, nbytes, small.address)

    patch.setattr(DeviceEngine, "allocate", wrong)
