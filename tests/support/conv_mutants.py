"""Errors of rows of convolutions that the contract suite must catch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.decoder.commit import Commit
from vlmexport.runtime.decoder.conv_slots import ConvSlots
from vlmexport.runtime.decoder.device_passes import DevicePasses, place_inputs
from vlmexport.runtime.decoder.token_tree import TokenTree

Patch = pytest.MonkeyPatch
SLOTS = "conv_slots"


class _Called(dict[int, np.ndarray]):
    """start → the slots of a chain, asked for anew every time."""

    def __init__(self, slots: ConvSlots, width: int) -> None:
        super().__init__()
        self._slots, self._width = slots, width

    def __getitem__(self, start: int) -> np.ndarray:
        out = np.empty((1, self._width, len(self._slots._back)), np.int64)
        self._slots.chain(out, 0, start, self._width)
        return out[0]


def _chains(patch: Patch, change: Any) -> None:
    """`change(slots, start, width)` of every chain's slots [width, kernel − 1], which it is given."""
    chain = ConvSlots.chain

    def wrong(self: ConvSlots, out: np.ndarray, batch_index: int, start: int, width: int) -> None:
        chain(self, out, batch_index, start, width)
        out[batch_index] = change(self, out[batch_index].copy(), batch_index, start, width)

    patch.setattr(ConvSlots, "chain", wrong)
    patch.setattr(ConvSlots, "seen", lambda self, width, cache_len: _Called(self, width))


def rejected_rows_read(patch: Patch) -> None:
    """Behind a rejected token come the rows that the pass before wrote last, not those of the text."""
    ends: dict[tuple[int, int], int] = {}

    def change(self: ConvSlots, slots: np.ndarray, batch_index: int, start: int, width: int) -> np.ndarray:
        end = ends.get((id(self), batch_index), start)
        ends[id(self), batch_index] = start + width
        behind = end - start if 0 < end - start < 8 else 0
        return np.where((slots < start) & (slots >= 0), slots + behind, slots)

    _chains(patch, change)


def slots_before_in_trees(patch: Patch) -> None:
    """A node reads the slots before its own, in which siblings may lie."""
    patch.setattr(
        ConvSlots,
        "_of_nodes",
        lambda self, start, tree, nodes: self._table[start + np.asarray(list(nodes))],
    )


def slots_before_in_trees_on_a_device(patch: Patch) -> None:
    """The same of the slots that a device finds: once more, over nodes that follow each other, for those alone."""
    bind = DevicePasses.bind

    def wrong(self: Any, forward_pass: Any, up: Any, number: int, nodes: Any) -> Any:
        first, *rest = bind(self, forward_pass, up, number, nodes)
        engine, (depths, ancestors) = self._engine, nodes
        chain = TokenTree.chain([0] * depths.shape[1])
        places = engine.constant(f"by_slot.{depths.shape}", np.arange(depths.shape[1])[None])
        before = engine.constant(f"before.{ancestors.shape}", chain.ancestors[None])
        inputs = {
            "start": up.view(f"start.{number}", 1), "slots": self._cache_slots(), "depths": places,
            "slot_depths": places, "ancestors": before, "first_positions": up.view(f"first.{number}", 1),
        }  # fmt: skip
        masks, positions, _ = place_inputs(self._passes, forward_pass)
        told = masks if positions is None else {**masks, "positions": positions}
        outputs = {
            name: view
            if name == SLOTS
            else engine.allocate("unread", view.nbytes).view(view.shape, view.dtype)
            for name, view in told.items()
        }
        return [first, engine.bind("mask", inputs, outputs), *rest]

    patch.setattr(DevicePasses, "bind", wrong)


def one_row_too_few(patch: Patch) -> None:
    """The farthest token that a convolution sees is left out."""
    made: Any = ConvSlots.__init__

    def wrong(self: ConvSlots, capacity: int, kernel: int) -> None:
        made(self, capacity, kernel)
        self._table = self._table.copy()
        self._table[:, 0] = -1

    patch.setattr(ConvSlots, "__init__", wrong)


def first_row_before_the_beginning(patch: Patch) -> None:
    """In place of zeros before a sequence stands the row of its first token."""
    _chains(patch, lambda self, slots, batch_index, start, width: np.maximum(slots, 0))


def rows_not_committed(patch: Patch) -> None:
    """The path of a tree moves keys and values, and leaves the rows of convolutions where the tree had them."""
    run = Commit._run

    def wrong(self: Any, moves: Any, width: int) -> None:
        engine, arena = self._engine, self._arena
        kept = [
            (view, np.array(engine.read(view)))
            for layer in range(self._num_layers)
            for name, view in arena.views(layer).items()
            if name.startswith("conv")
        ]
        run(self, moves, width)
        for view, rows in kept:
            engine.write(view, rows)

    patch.setattr(Commit, "_run", wrong)
