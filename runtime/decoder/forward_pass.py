"""A pass that is prepared: segments bound to [batch, width] hidden states, and the host arrays that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..engines.base import Call, View
from ..engines.buffers import HostBuffer
from .logits import TargetLogits

PREFILL_WIDTH = 256
"""Prompt tokens per pass: bounds masks and activations; longer prompts take several passes."""

PREFILL_STEP = 16
"""Prefill widths are multiples of this, so that few shapes are bound."""

ChainStep = Callable[[Sequence[int] | None, int], None]
"""`step(tokens, start)`: run the pass over `tokens` (None: over the hidden states that lie there) from slot `start`
on."""


class ForwardPass:
    """A prepared run of segments over [batch, width] hidden states of the sequences from `batch_index` on. Host arrays
    are None where the pass reads none."""

    __slots__ = (
        "batch",
        "batch_index",
        "calls",
        "chain_step",
        "counts",
        "embeds",
        "encoder_version",
        "heads",
        "hidden",
        "indices",
        "input",
        "masks",
        "positions",
        "pushes",
        "result",
        "width",
    )

    def __init__(self, batch: int, width: int, batch_index: int):
        self.batch, self.width, self.batch_index = batch, width, batch_index
        self.encoder_version = -1
        """The encoder's `version` for which the cross-attention mask was written."""
        self.calls: list[Call] = []
        self.heads: dict[int, TargetLogits] = {}
        """The head over the first hidden states of the result, by their number."""
        self.pushes: list[tuple[HostBuffer, tuple[int, ...]]] = []
        self.hidden: np.ndarray | None = None
        """The host side of `input`."""
        self.embeds: np.ndarray
        """`hidden` as [batch × width, E], where there is one."""
        self.input: View | None = None
        """[batch, width, E] where the embeddings of tokens enter; None: the pass reads exit states where they lie."""
        self.counts: list[tuple[np.ndarray, np.ndarray, list[int]]] = []
        """Of each segment with linear attention, int64 [batch] of rows that it replays and that it folds, and what its states
        hold of every sequence."""
        self.masks: dict[str, np.ndarray]
        """[batch, heads, width, cache] by the input of the graphs that reads it."""
        self.indices: np.ndarray
        self.positions: np.ndarray | None = None
        """[batch, axes, width]"""
        self.chain_step: ChainStep | None = None
        """The pass over a chain of one sequence where that has a fast path."""
        self.result: View
        """[batch, width, E]: hidden states after the last segment."""
