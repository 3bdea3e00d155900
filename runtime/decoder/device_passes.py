"""The calls of a pass whose mask and positions the device computes, by the graph `mask`."""

from __future__ import annotations

import numpy as np

from ..engines.base import Call, View
from .device.packed_buffers import Fields
from .forward_pass import ForwardPass
from .forward_passes import ForwardPasses
from .masks import relations
from .token_tree import TokenTree

TreeViews = tuple[View, View]
"""`depths` and `ancestors` of the nodes of a pass, as the graph `mask` reads them."""


def place_inputs(
    passes: ForwardPasses, forward_pass: ForwardPass
) -> tuple[dict[str, View], View | None, View]:
    """Where a pass reads its masks by name, its positions (None: it takes none) and the slots of its first tokens."""
    slots = passes.write_indices.view((forward_pass.batch,))
    return passes.masks.views(forward_pass), passes.positions.view(forward_pass), slots


class DevicePasses:
    """Binds passes behind the graph `mask`, and holds what that reads that never changes."""

    def __init__(self, passes: ForwardPasses):
        self._passes, self._engine = passes, passes.engine
        self._slots: View | None = None
        self._bias: View | None = None
        self._chains: dict[int, TreeViews] = {}
        self._last_nodes: dict[int, TreeViews] = {}

    def bind(self, forward_pass: ForwardPass, up: Fields, number: int, nodes: TreeViews) -> list[Call]:
        """A pass that begins at the slot in `start.number`, with its mask and positions."""
        engine, start = self._engine, up.view(f"start.{number}", 1)
        depths, ancestors = nodes
        masks, positions, indices = place_inputs(self._passes, forward_pass)
        inputs = {"start": start, "slots": self._cache_slots(), "depths": depths, "ancestors": ancestors}
        names = {value.name for value in engine.interface("mask").inputs}
        if "first_positions" in names:
            inputs["first_positions"] = up.view(f"first.{number}", 1)
        if "slot_depths" in names:
            inputs["slot_depths"] = depths
        if "distance_bias" in names:
            inputs["distance_bias"] = self._distance_bias()
        outputs = masks | ({} if positions is None else {"positions": positions})
        return [engine.bind("mask", inputs, outputs), engine.copy(indices, start), *forward_pass.calls]

    def chain(self, width: int) -> TreeViews:
        """The nodes of a chain: depths [1, width] and ancestors [1, width, width]."""
        if width not in self._chains:
            depths, ancestors = relations(TokenTree.chain([0] * width), width)
            self._chains[width] = (
                self._engine.constant(f"chain.{width}.depths", depths[None]),
                self._engine.constant(f"chain.{width}.ancestors", ancestors[None]),
            )
        return self._chains[width]

    def last_of_chain(self, length: int) -> TreeViews:
        """The last node of a chain: depths [1] and ancestors [1, length]."""
        if length not in self._last_nodes:
            self._last_nodes[length] = (
                self._engine.constant(f"path.{length}.depths", np.array([length - 1])),
                self._engine.constant(f"path.{length}.ancestors", np.ones((1, length), np.bool_)),
            )
        return self._last_nodes[length]

    def _cache_slots(self) -> View:
        """int64 [cache]: every slot."""
        arena = self._passes.arena
        if self._slots is None:
            self._slots = self._engine.constant("slots", np.arange(arena.capacity, dtype=np.int64))
        return self._slots.buffer.view((arena.cache_len,), "int64")

    def _distance_bias(self) -> View:
        """What the mask graph takes of a relative bias; the same for the life of the engine."""
        if self._bias is None:
            (mask,) = self._passes.masks.causal.values()  # a bias and windows have no family in common
            self._bias = self._engine.constant("distance_bias", mask.distance_bias)
        return self._bias
