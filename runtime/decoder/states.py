"""States of layers with linear attention: what each sequence's hold, and what a pass is told to replay and to fold.

A state cannot be cut back, so it holds only what is accepted. Between cycles it lacks the rows that the last cycle accepted; the
first pass of a cycle over a layer folds those, and every pass replays what its state lacks. Rejecting lowers a length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import DTYPES, Buffer, Engine, View
from ..engines.buffers import HostBuffer
from ..graphs.states import COUNTS, linear_layers, sequence_states
from .forward_pass import ForwardPass


class States:
    """The states of up to `max_batch` sequences, of fixed size each. A decoder without linear attention has none."""

    def __init__(self, engine: Engine, manifest: Manifest, max_batch: int):
        self._engine, self._info = engine, manifest.decoder
        cuts = self._info.cuts
        self._held = {
            number: [0] * max_batch
            for number, (first, end) in enumerate(itertools.pairwise(cuts))
            if linear_layers(self._info.layer_types, range(first, end))
        }
        """By segment, rows that its states of each sequence hold."""
        self._buffers: dict[str, tuple[Buffer, tuple[int, ...], str]] = {}
        """By name: where it lies, and the shape and type of one sequence's."""
        for name, (_, shape) in sequence_states(manifest, range(manifest.decoder.num_layers)).items():
            dtype = engine.dtype(_segment_with(manifest, name), name)
            nbytes = max_batch * int(np.prod(shape)) * DTYPES[dtype].itemsize
            self._buffers[name] = engine.allocate(name, nbytes, zeroed=True), shape, dtype
        self._counts = {
            number: {name: HostBuffer(engine, f"{name}.{number}", max_batch, "int64") for name in COUNTS}
            for number in self._held
        }

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer, _, _ in self._buffers.values())

    # --- the sequences ---

    def begin(self, batch_index: int) -> None:
        """A sequence with nothing cached: the rows before its first are zero, for the convolution too."""
        for held in self._held.values():
            held[batch_index] = 0
        self.clear(batch_index)

    def length(self, batch_index: int) -> int:
        """Rows that some state of a sequence holds: it cannot be cut to fewer."""
        return max((held[batch_index] for held in self._held.values()), default=0)

    def clear(self, batch_index: int) -> None:
        """Zero the states of a sequence, whatever they hold."""
        for name in self._buffers:
            view = self._view(name, batch_index, 1)
            self._engine.write(view, np.zeros(view.shape, DTYPES[view.dtype]))

    def replace(self, batch_index: int, last: int) -> None:
        """The sequence in the last place takes another's."""
        for held in self._held.values():
            held[batch_index] = held[last]
        if batch_index != last:
            for name in self._buffers:
                self._engine.copy(self._view(name, batch_index, 1), self._view(name, last, 1)).run()

    # --- what passes are told ---

    def attach(self, forward_pass: ForwardPass, segment: int) -> dict[str, View]:
        """Give a pass the host arrays of a segment, and what brings them to the engine; what its graph reads."""
        if segment not in self._counts:
            return {}
        shape, buffers = (forward_pass.batch,), self._counts[segment]
        pending, folded = (buffers[name].host(shape) for name in COUNTS)
        forward_pass.counts.append((pending, folded, self._held[segment]))
        forward_pass.pushes += [(buffer, shape) for buffer in buffers.values()]
        return {name: buffer.view(shape) for name, buffer in buffers.items()}

    def bindings(
        self, layers: Iterable[int], batch_index: int, batch: int
    ) -> tuple[dict[str, View], dict[str, View]]:
        """Inputs and outputs `updated_*` (same addresses) of those of some layers that keep a state."""
        own = {f".{layer}" for layer in linear_layers(self._info.layer_types, layers)}
        inputs = {
            name: self._view(name, batch_index, batch)
            for name in self._buffers
            if name[name.rindex(".") :] in own
        }
        return inputs, {f"updated_{name}": view for name, view in inputs.items()}

    def step_of(self, forward_pass: ForwardPass, lengths: Sequence[int]) -> Callable[[int], None] | None:
        """`write_cycle` of a pass over a chain of one sequence, by the slot where it begins; None where it has no states."""
        if not forward_pass.counts:
            return None
        write_cycle = self.write_cycle
        return lambda start: write_cycle(forward_pass, lengths, start - lengths[0])

    @staticmethod
    def write_cycle(forward_pass: ForwardPass, lengths: Sequence[int], ahead: int) -> None:
        """Of a pass whose first rows stand `ahead` slots behind what is valid, `lengths`: the first one behind an accepted row
        folds it."""
        first, count = forward_pass.batch_index, forward_pass.batch
        for pending, folded, held in forward_pass.counts:
            for row, length in zip(range(count), lengths[first : first + count], strict=True):
                folded[row] = length - held[first + row]
                pending[row] = folded[row] + ahead
                held[first + row] = length

    @staticmethod
    def write_prompt(forward_pass: ForwardPass, start: int, count: int) -> None:
        """Of a pass over `count` rows of a prompt in slots from `start` on: it folds them, and what lies before them."""
        for pending, folded, held in forward_pass.counts:
            pending[0] = start - held[forward_pass.batch_index]
            folded[0] = pending[0] + count
            held[forward_pass.batch_index] = start + count

    def _view(self, name: str, batch_index: int, batch: int) -> View:
        buffer, shape, dtype = self._buffers[name]
        return buffer.view((batch, *shape), dtype, batch_index * int(np.prod(shape)))


def _segment_with(manifest: Manifest, name: str) -> str:
    """The segment that reads an input."""
    return next(
        segment
        for segment in manifest.segments
        if any(value.name == name for value in manifest.graphs[segment].inputs)
    )
