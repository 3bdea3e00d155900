"""Errors of an imitation network's attention: none of them changes a token, each makes its drafts worse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.device.draft_chain import Sent
from vlmexport.runtime.decoder.kv_cache import KVArena
from vlmexport.runtime.drafts.imitation.with_attention import Attending

Patch = pytest.MonkeyPatch


def prompt_rows_missing(patch: Patch) -> None:
    """Nothing of a prompt passes the network."""
    patch.setattr(Attending, "on_hidden_states", lambda self, sequence, slot, rows: None)


def prompt_one_slot_late(patch: Patch) -> None:
    """Rows of a prompt lie one slot behind their own."""
    on_rows = Attending.on_hidden_states

    def wrong(self: Any, sequence: Any, slot: int, rows: Any) -> None:
        on_rows(self, sequence, slot + 1, rows)

    patch.setattr(Attending, "on_hidden_states", wrong)


def last_draft_missing(patch: Patch) -> None:
    """The row of the last drafted token does not pass: it is there when all are accepted, with what an earlier cycle left."""
    patch.setattr(Attending, "passed", lambda self, step: None)
    patch.setattr(Attending, "last_step", lambda self, hidden, number, sent: [])


def plain_cycles_missing(patch: Patch) -> None:
    """Rows of passes in which nothing was drafted do not pass."""
    patch.setattr(Attending, "on_pass", lambda self: None)


def every_cycle_taken_for_drafted(patch: Patch) -> None:
    """What a cycle drafted is remembered: the passes that follow without a draft are taken for done."""
    on_pass = Attending.on_pass

    def wrong(self: Any) -> None:
        drafted = self._drafted
        on_pass(self)
        self._drafted = drafted

    patch.setattr(Attending, "on_pass", wrong)


def rejected_rows_seen(patch: Patch) -> None:
    """Slots behind a row, where rejected drafts of the cycle before lie, are still in sight."""
    place = Attending._place

    def wrong(self: Any, starts: Any, width: int, own: Any) -> None:
        place(self, starts, width, own)
        shape = (len(starts), 1, width, self._arena.cache_len)
        mask = self._mask.host(shape)
        for row, start in enumerate(starts):
            mask[row, ..., : start + width + 2] = True
        self._mask.push(shape)

    patch.setattr(Attending, "_place", wrong)


def rejected_rows_kept(patch: Patch) -> None:
    """Drafting goes on behind what was drafted last, whatever was accepted of it."""
    place_step, far = Attending._place_step, [0]

    def wrong(self: Any, step: int) -> None:
        lengths = self._arena.lengths
        before = list(lengths)
        lengths[: self._arena.batch] = [length + far[0] for length in lengths[: self._arena.batch]]
        place_step(self, step)
        lengths[:] = before

    on_pass = Attending.on_pass

    def noted(self: Any) -> None:
        far[0] = 1 if self._drafted else 0
        on_pass(self)

    patch.setattr(Attending, "_place_step", wrong)
    patch.setattr(Attending, "on_pass", noted)


def one_position_late(patch: Patch) -> None:
    """Drafted rows stand one position further than those of the prompt say."""
    place_step = Attending._place_step

    def wrong(self: Any, step: int) -> None:
        place_step(self, step)
        shape = (self._arena.batch, 1)
        self._positions.host(shape)[...] += 1
        self._positions.push(shape)

    patch.setattr(Attending, "_place_step", wrong)


def keys_of_the_first_sequence(patch: Patch) -> None:
    """Prompts leave their keys and values in the first place of the batch."""
    patch.setattr(Decoder, "last_batch_index", property(lambda self: 0))


@contextmanager
def without_the_drafts(arena: Any) -> Iterator[None]:
    """The arena moves the target's layers alone, the last of its layers being the draft's."""
    whole = arena._buffers
    own = {id(buffer) for layer in arena.layers[:-1] for buffer in layer.values()}
    arena._buffers = arena._growth._caches = [pair for pair in whole if id(pair[0]) in own]
    yield
    arena._buffers = arena._growth._caches = whole


def keys_of_who_left(patch: Patch) -> None:
    """The last sequence takes the place of one that leaves, its keys and values of the draft do not."""
    remove = KVArena.remove

    def wrong(self: Any, row: int) -> None:
        with without_the_drafts(self):
            remove(self, row)

    patch.setattr(KVArena, "remove", wrong)


def own_rows_left_by_growth(patch: Patch) -> None:
    """The caches grow, and the draft's rows stay in the old layout."""
    grow = KVArena._grow

    def wrong(self: Any, rows: int) -> None:
        with without_the_drafts(self):
            grow(self, rows)

    patch.setattr(KVArena, "_grow", wrong)


def rows_of_the_pass_before(patch: Patch) -> None:
    """After a tail the exit rows are not brought to where rows of a pass over all segments lie: an older pass's are there."""
    tapped = Decoder.hidden_after

    def wrong(self: Any, layer: int) -> Any:
        self.exits.last_tail = (-1, 0, 0)
        return tapped(self, layer)

    patch.setattr(Decoder, "hidden_after", wrong)


def slots_of_the_first_step(patch: Patch) -> None:
    """On a device every drafted row of a cycle lies in the slot of the first one."""
    sent_on_device = Attending.sent_on_device

    def wrong(self: Any, count: int, start: int) -> Any:
        each = sent_on_device(self, count, start).each
        return Sent({}, {**each, "slot": np.broadcast_to(each["slot"][:1], each["slot"].shape)})

    patch.setattr(Attending, "sent_on_device", wrong)


def masks_of_the_first_step(patch: Patch) -> None:
    """On a device every drafted row of a cycle sees what the first one sees."""
    sent_on_device = Attending.sent_on_device

    def wrong(self: Any, count: int, start: int) -> Any:
        each = sent_on_device(self, count, start).each
        return Sent(
            {}, {**each, "attn_mask": np.broadcast_to(each["attn_mask"][:1], each["attn_mask"].shape)}
        )

    patch.setattr(Attending, "sent_on_device", wrong)
