"""One program of a cycle: what goes up before it, what comes down after it, and the passes that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..engines.base import DTYPES, Program, View, dtype_name
from .device.draft_chain import Sent
from .device.packed_buffers import Fields, HostFields
from .forward_pass import ForwardPass

INT64 = DTYPES["int64"]


def draft_field(name: str) -> str:
    """The field of the upload for an input that a draft sends."""
    return f"draft.{name}"


def draft_sizes(sent: Sent) -> dict[str, int]:
    """Bytes of the fields of what a draft sends."""
    sizes = {draft_field(name): values.nbytes for name, values in sent.once.items()}
    for name, values in sent.each.items():
        sizes |= {draft_field(f"{name}.{step}"): value.nbytes for step, value in enumerate(values)}
    return sizes


@dataclass
class Transfers:
    """What goes up and comes down in a cycle, and what its logits pass behind a head (None: nothing)."""

    up: Fields
    down: Fields
    graph: str | None

    def inputs(self, counts: Mapping[str, int]) -> dict[str, View]:
        """Fields of int64, so many of each."""
        return {name: self.up.view(name, count) for name, count in counts.items()}

    def draft_inputs(self, sent: Sent) -> dict[str, View]:
        """What a draft sends, where the engine has it."""
        numbered = {
            f"{name}.{step}": value for name, values in sent.each.items() for step, value in enumerate(values)
        }
        return {
            name: self.up.view(draft_field(name), *values.shape, dtype=dtype_name(values))
            for name, values in {**sent.once, **numbered}.items()
        }


class CycleProgram:
    """A program with the host's view of its fields. `steps`: passes that begin at a slot of their own, less one."""

    def __init__(self, program: Program, passes: list[ForwardPass], transfers: Transfers, steps: int):
        self.program, self.passes = program, passes
        self._up = HostFields(transfers.up, program.upload)
        self._down = HostFields(transfers.down, program.download)
        self._steps = np.arange(steps + 1)
        self._starts, self._firsts = (
            self._up.each(name, self._steps.dtype, self._steps.shape) for name in ("start", "first")
        )

    def send(self, name: str, values: np.ndarray | list[int] | int) -> None:
        """Write a field of the upload: as many int64 as it has, one for all of it, or an array."""
        if isinstance(values, np.ndarray):
            self._up.one(name, values.dtype, values.shape)[...] = values
        else:
            self._up.one(name, INT64)[:] = values

    def send_starts(self, slot: int, position: int) -> None:
        """Write the first slot and the first position of every step; those of the first are given."""
        np.add(self._steps, slot, out=self._starts)
        np.add(self._steps, position, out=self._firsts)

    def send_draft(self, sent: Sent) -> None:
        """Write what a draft sends."""
        for name, values in sent.once.items():
            self.send(draft_field(name), values)
        for name, values in sent.each.items():
            self._up.each(draft_field(name), values.dtype, values.shape)[...] = values

    def read(self, name: str, dtype: str = "int64") -> np.ndarray:
        """A field of the download, [n]."""
        return self._down.one(name, DTYPES[dtype])
