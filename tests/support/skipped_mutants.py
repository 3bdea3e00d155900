"""Errors of a draft that shares the target's caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.drafts.layer_skip_options import kept_attention

Patch = pytest.MonkeyPatch


def drafted_rows_kept(patch: Patch) -> None:
    """Verification leaves the rows that drafting wrote: the target then looks at what it never computed."""
    full = Decoder.full

    def wrong(self: Any, *trees: Any) -> None:
        layers = kept_attention(self.manifest)
        before = [
            [np.array(self.engine.read(view)) for view in self.arena.views(layer).values()]
            for layer in layers
        ]
        full(self, *trees)
        for layer, kept in zip(layers, before, strict=True):
            for view, rows in zip(self.arena.views(layer).values(), kept, strict=True):
                now = np.array(self.engine.read(view))
                for row, (start, tree) in enumerate(zip(self.arena.lengths, trees, strict=False)):
                    drafted = slice(start, start + len(tree) - 1)
                    now[row, :, drafted] = rows[row, :, drafted]
                self.engine.write(view, now)

    patch.setattr(Decoder, "full", wrong)


def drafts_one_slot_late(patch: Patch) -> None:
    """A drafted token takes the slot behind its own, and looks at what lies before it."""
    ahead = Decoder.run_partial
    patch.setattr(Decoder, "run_partial", lambda self, run, tokens, step: ahead(self, run, tokens, step + 1))


def every_step_in_the_first_slot(patch: Patch) -> None:
    """Drafted tokens take the pending token's slot, and look at none but themselves behind the text."""
    ahead = Decoder.run_partial
    patch.setattr(Decoder, "run_partial", lambda self, run, tokens, step: ahead(self, run, tokens, 0))
