"""Errors of windows and of blocks that the contract suite must catch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.decoder import prefill
from vlmexport.runtime.decoder.attention_masks import AttentionMasks
from vlmexport.runtime.decoder.device_passes import DevicePasses, place_inputs
from vlmexport.runtime.decoder.masks import CausalMask

Patch = pytest.MonkeyPatch
WINDOW = "sliding_mask"


def window_by_slot(patch: Patch) -> None:
    """A window counts slots: of a tree's nodes those that lie near, whatever their depth."""
    write = AttentionMasks.write_tree

    def wrong(self: Any, forward_pass: Any, batch_index: int, start: int, tree: Any) -> None:
        write(self, forward_pass, batch_index, start, tree)
        out = forward_pass.masks[WINDOW][batch_index : batch_index + 1]
        whole = CausalMask(out.shape[3] + out.shape[2], 1, np.dtype(np.bool_))
        whole.tree(out, 0, start, tree)
        slots = start + np.arange(out.shape[2])[:, None] - np.arange(out.shape[3])
        out &= slots < self._info.sliding_window

    patch.setattr(AttentionMasks, "write_tree", wrong)


def window_by_slot_on_a_device(patch: Patch) -> None:
    """The same of the masks that a device makes: once more, over nodes as deep as their slots, for the window alone."""
    bind = DevicePasses.bind

    def wrong(self: Any, forward_pass: Any, up: Any, number: int, nodes: Any) -> Any:
        first, *rest = bind(self, forward_pass, up, number, nodes)
        engine, (depths, ancestors) = self._engine, nodes
        slots = engine.constant(f"by_slot.{depths.shape}", np.arange(depths.shape[1])[None])
        inputs = {
            "start": up.view(f"start.{number}", 1), "slots": self._cache_slots(), "depths": slots,
            "slot_depths": slots, "ancestors": ancestors, "first_positions": up.view(f"first.{number}", 1),
        }  # fmt: skip
        masks, positions, _ = place_inputs(self._passes, forward_pass)
        outputs = {
            name: view
            if name == WINDOW
            else engine.allocate("unread", view.nbytes).view(view.shape, view.dtype)
            for name, view in {**masks, "positions": positions}.items()
        }
        return [first, engine.bind("mask", inputs, outputs), *rest]

    patch.setattr(DevicePasses, "bind", wrong)


def _window_of(patch: Patch, more: int) -> None:
    made: Any = CausalMask.__init__

    def wrong(self: Any, *given: Any, **named: Any) -> None:
        *rest, window = given
        made(self, *rest, None if window is None else window + more, **named)

    patch.setattr(
        CausalMask,
        "__init__",
        lambda self, *given, **named: (wrong if len(given) == 6 else made)(self, *given, **named),
    )


def window_one_too_long(patch: Patch) -> None:
    """At most the window's distance, in place of less."""
    _window_of(patch, +1)


def window_one_too_short(patch: Patch) -> None:
    """A position does not count itself."""
    _window_of(patch, -1)


def causal_blocks(patch: Patch) -> None:
    """Blocks of a prompt see what is before each row, as text does."""
    patch.setattr(CausalMask, "block", lambda self, out, batch_index, start, first, end: None)


def borders_within_blocks(patch: Patch) -> None:
    """Passes over a prompt end wherever they are full; the part of a block in each sees itself."""

    def chunks(first: int, end: int, most: int, blocks: Any = ()) -> Any:
        yield from ((at, min(at + most, end)) for at in range(first, end, most))

    def within(blocks: Any, start: int, end: int) -> Any:
        parts = [(max(first, start), min(stop, end)) for first, stop in blocks]
        return [(first, stop) for first, stop in parts if first < stop]

    patch.setattr(prefill, "prompt_chunks", chunks)
    patch.setattr(prefill, "blocks_within", within)


def prefix_within_windows(patch: Patch) -> None:
    """A prefix sees no more of itself than the window holds, as a picture of Gemma 3 does."""
    made: Any = CausalMask.__init__
    patch.setattr(CausalMask, "__init__", lambda self, *given, whole_blocks=False: made(self, *given))


def blocks_beyond_windows(patch: Patch) -> None:
    """A block sees all of itself also where that is farther away than the window."""

    def wrong(self: Any, out: np.ndarray, batch_index: int, start: int, first: int, end: int) -> None:
        out[batch_index, :, first - start : end - start, first:end] = True

    patch.setattr(CausalMask, "block", wrong)
