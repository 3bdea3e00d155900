"""Errors of an EAGLE-3 draft, in what it adds to EAGLE: rows of three layers, joined once per pass."""

from __future__ import annotations

from typing import Any

import pytest
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.drafts.eagle.eagle3 import Eagle3

Patch = pytest.MonkeyPatch


def layers_in_another_order(patch: Patch) -> None:
    """The rows of the highest layer are joined where those of the lowest belong."""
    init = Eagle3.__init__

    def wrong(self: Any, *given: Any) -> None:
        init(self, *given)
        self._layers = tuple(reversed(self._layers))

    patch.setattr(Eagle3, "__init__", wrong)


def rows_of_the_pass_before(patch: Patch) -> None:
    """What was joined is kept for the next pass of as many rows."""
    join = Eagle3._join

    def wrong(self: Any, rows: Any) -> Any:
        shape = self._decoder.hidden_after(self._layers[0]).shape
        if shape in self._joins:
            self._number = self._decoder.pass_number
        return join(self, rows)

    patch.setattr(Eagle3, "_join", wrong)


def first_rows_of_a_pass(patch: Patch) -> None:
    """Whatever rows are asked for, the first ones of the pass are taken: another sequence's."""
    patch.setattr(Decoder, "offset_of", lambda self, rows: 0)


def last_rows_alone(patch: Patch) -> None:
    """The last row of a pass in place of the joined ones, as EAGLE has it."""
    patch.setattr(Eagle3, "_join", lambda self, rows: rows)


def trunk_rows_of_the_last_pass(patch: Patch) -> None:
    """Where a trunk ran ahead of the verifying pass, the rows after its layers are those of the pass before."""
    tapped = Decoder.hidden_after
    kept: dict[int, Any] = {}

    def wrong(self: Any, layer: int) -> Any:
        view = tapped(self, layer)
        rows = self.engine.read(view).copy()
        before = kept.get(layer)
        kept[layer] = rows
        if before is not None and before.shape == rows.shape and len(rows):
            self.engine.write(view, before)
        return view

    patch.setattr(Decoder, "hidden_after", wrong)
