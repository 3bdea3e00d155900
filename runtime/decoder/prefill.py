"""A prompt on its way through the decoder, one chunk at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..common.errors import PromptError
from ..engines.base import View
from .forward_pass import PREFILL_STEP
from .forward_passes import ForwardPasses
from .kv_cache import KVArena
from .logits import TargetLogits
from .positions import next_position
from .prompt_chunks import Block, blocks_within, prompt_chunks

OnHiddenStates = Callable[[int, View], None]
"""`on_hidden_states(first slot, hidden states [1, n, E])`: hidden states before the final norm of one chunk of a
prompt."""


class PromptDecoder(Protocol):
    """What of the decoder a prompt needs."""

    arena: KVArena
    passes: ForwardPasses
    max_length: int
    prefill_width: int
    dtype: str

    def reserve(self, slots: int, batch_index: int | None = None) -> None:
        """Bind caches that hold so many slots after a sequence."""

    def head(self, num_logits: int, first: int = 0) -> TargetLogits:
        """What the target says after tokens of the last pass."""
        ...


class Prefill:
    """Runs all segments over hidden states of the prompt of a sequence, as `Decoder.embed` gives them, behind those that it
    has (`Decoder.resume`). Other sequences may go through cycles between two chunks, while it is staged
    (`Decoder.stage`).

    `positions` int64 [axes, all tokens] by default count from 0; later positions go on after the highest. Widths are
    rounded up to few sizes. `blocks` of the whole prompt see themselves in both directions, and go through one pass
    each. Raises `PromptError` for an empty prompt, and for more than the session holds.
    """

    def __init__(
        self,
        decoder: PromptDecoder,
        hidden_states: np.ndarray,
        batch_index: int = 0,
        positions: np.ndarray | None = None,
        on_hidden_states: OnHiddenStates | None = None,
        blocks: Sequence[Block] = (),
    ):
        self._decoder, self._hidden_states, self._positions = decoder, hidden_states, positions
        self.batch_index = batch_index
        """The place of the sequence. It changes when another one leaves."""
        self._on_hidden_states, self._blocks = on_hidden_states, blocks
        self._before = decoder.arena.lengths[batch_index]
        self._count = self._before + len(hidden_states)
        if not (len(hidden_states) and self._count <= decoder.max_length):
            raise PromptError(f"the prompt has {self._count} rows, the session holds 1..{decoder.max_length}")
        self._chunks = deque(prompt_chunks(self._before, self._count, decoder.prefill_width, blocks))

    def step(self) -> TargetLogits | None:
        """Run the next chunk; after the last one, what the target says after its last token."""
        decoder, batch_index = self._decoder, self.batch_index
        arena, passes = decoder.arena, decoder.passes
        start, end = self._chunks.popleft()
        chunk, used = self._hidden_states[start - self._before : end - self._before], end - start
        width = used if used <= 2 else -(-used // PREFILL_STEP) * PREFILL_STEP
        width = max(width, passes.least_width)
        width = min(width, decoder.prefill_width, arena.capacity - start)
        decoder.reserve(width, batch_index)
        forward_pass = passes.prepare(0, len(passes.segments), width, 0, batch_index, 1)
        places = None if self._positions is None else self._positions[:, start:end]
        passes.run_prompt(forward_pass, chunk, start, places, blocks_within(self._blocks, start, end))
        arena.advance(used, batch_index)
        if self._on_hidden_states is not None:
            result = forward_pass.result
            hidden = result.buffer.view((1, used, result.shape[-1]), decoder.dtype)
            self._on_hidden_states(start, hidden)
        if self._chunks:
            return None
        if self._positions is not None:
            passes.positions.offsets[batch_index] = next_position(self._positions) - self._count
        return decoder.head(1, first=used - 1)
