"""Errors of an EAGLE draft: none of them changes a token, each makes its proposals worse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vlmexport.exporter.drafts.eagle.eagle import D2T
from vlmexport.runtime.decoder import positions
from vlmexport.runtime.drafts.eagle import eagle
from vlmexport.runtime.drafts.eagle.dynamic_tree import Growth
from vlmexport.runtime.drafts.eagle.eagle import Eagle
from vlmexport.runtime.drafts.eagle.layer_pass import EaglePass

from tests.support.rig import Rig

Patch = pytest.MonkeyPatch


def rows_of_rejected_nodes(patch: Patch) -> None:
    """Keys and values of nodes that were rejected stay: the first rows of a tree are taken for the accepted ones."""
    advance = Eagle.advance

    def wrong(self: Any, sequence: Any, tree: Any, verdict: Any, rows: Any) -> None:
        first = list(range(1, len(verdict.path) + 1))
        advance(self, sequence, tree, verdict._replace(path=first), rows)

    patch.setattr(Eagle, "advance", wrong)


def feature_off_by_one(patch: Patch) -> None:
    """Every accepted token is paired with the feature of the token before the one it should be paired with."""
    advance = Eagle.advance

    def wrong(self: Any, sequence: Any, tree: Any, verdict: Any, rows: Any) -> None:
        advance(self, sequence, tree, verdict._replace(path=[0, *verdict.path][:-1]), rows)

    patch.setattr(Eagle, "advance", wrong)


def _changed_pass(patch: Patch, drafted: bool, change: Any) -> None:
    """`change(pass, batch, width)` before a pass over the target's features, or over the layer's own."""
    run = EaglePass.run

    def wrong(self: Any, features: Any, asked: Any, row: int = 0) -> Any:
        if (features is None) == drafted:
            change(self, *self._shape)
        return run(self, features, asked, row)

    patch.setattr(EaglePass, "run", wrong)


def scratch_rows_seen(patch: Patch) -> None:
    """The slots in which the last tree grew are still in sight."""

    def change(self: Any, batch: int, width: int) -> None:
        mask = self._mask.host((batch, 1, width, self.arena.cache_len))
        for row in range(batch):
            mask[row, ..., : self._indices.host((batch,))[row] + width + 2] = True

    _changed_pass(patch, False, change)


def siblings_seen(patch: Patch) -> None:
    """A node that grows sees every node before it."""

    def change(self: Any, batch: int, width: int) -> None:
        mask = self._mask.host((batch, 1, width, self.arena.cache_len))
        slots = np.arange(self.arena.cache_len)
        for row in range(batch):
            mask[row] = slots <= self._indices.host((batch,))[row] + np.arange(width)[:, None]

    _changed_pass(patch, True, change)


def growth_one_position_late(patch: Patch) -> None:
    """Nodes that grow stand one position too far."""

    def change(self: Any, batch: int, width: int) -> None:
        self.positions((batch, width))[...] += 1

    _changed_pass(patch, True, change)


def one_axis_of_positions(patch: Patch) -> None:
    """A layer with axes is given the slots of pairs, as one without."""
    patch.setattr(eagle, "positions_of_slots", lambda prompt, slots: slots[None])


def text_counts_slots(patch: Patch) -> None:
    """Text behind a picture stands where its slots are, not behind the picture."""
    patch.setattr(positions, "next_position", lambda known: known.shape[1])


def chains_count_slots(patch: Patch) -> None:
    """What a device drafts by itself stands at slots, behind pairs that do not."""
    inputs = EaglePass.chain_inputs

    def wrong(self: Any, width: int, count: int, start: int, placed: Any, *given: Any) -> Any:
        slots = np.broadcast_to(start + np.arange(placed.shape[1]), placed.shape)
        return inputs(self, width, count, start, slots, *given)

    patch.setattr(EaglePass, "chain_inputs", wrong)


def normed_twice(patch: Patch) -> None:
    """The layer's own features pass the target's final norm like the target's rows."""

    def change(self: Any, batch: int, width: int) -> None:
        self._kinds[True].host((1,))[0] = False
        self._kinds[True].push((1,))

    _changed_pass(patch, True, change)


def d2t_left_out(patch: Patch) -> None:
    """Indices of a trimmed vocabulary are taken for ids."""
    expand = Growth.expand

    def wrong(self: Any, node: int, tokens: Any, scores: Any) -> None:
        expand(self, node, [places[token] for token in tokens], scores)

    places: dict[int, int] = {}
    fresh = Rig.fresh

    def learned(self: Any) -> Any:
        d2t = self.tiny.bundle.tensor(D2T)
        places.update({int(token): place for place, token in enumerate(d2t)})
        return fresh(self)

    patch.setattr(Rig, "fresh", learned)
    patch.setattr(Growth, "expand", wrong)


def rows_of_who_left_kept(patch: Patch) -> None:
    """The last sequence takes the place of one that leaves, its waiting rows do not."""
    copy = Eagle._copy

    def wrong(self: Any, first: int, source: Any) -> None:
        if source.buffer is not self._hidden_states.view((1, self._size), self._dtype).buffer:
            copy(self, first, source)

    patch.setattr(Eagle, "_copy", wrong)
