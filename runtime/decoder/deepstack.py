"""What is added to hidden states behind the first layers where a picture's embeddings are (DeepStack, arXiv 2406.04334)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from ..bundle.manifest import DecoderInfo
from ..engines.base import Engine, View
from ..engines.buffers import HostBuffer
from ..graphs.values import deepstack_inputs


class DeepStack:
    """A buffer [tokens, E] for each of the decoder's `deepstack_layers`, which all passes share: zero but in the pass over
    a picture's embeddings."""

    def __init__(self, engine: Engine, info: DecoderInfo, max_num_tokens: int, dtype: str):
        """At most `max_num_tokens` tokens per pass; `dtype` is that of hidden states."""
        self._info, self._size = info, info.hidden_size
        names = deepstack_inputs(info.deepstack_layers, range(info.num_layers))
        self._buffers = {name: HostBuffer(engine, name, max_num_tokens * self._size, dtype) for name in names}
        self._written = max_num_tokens
        """Tokens, from the first on, whose numbers may not be zero."""
        self.clear()

    def views(self, layers: Sequence[int], shape: tuple[int, ...]) -> dict[str, View]:
        """Inputs of a graph over `layers`, of hidden states of `shape` [batch, width, E]."""
        names = deepstack_inputs(self._info.deepstack_layers, layers)
        return {name: self._buffers[name].view(shape) for name in names}

    def widened(self, embeds: np.ndarray) -> np.ndarray:
        """Embeddings [n, E] of text as wide as those of pictures, [n, (1 + layers) · E]."""
        return np.pad(embeds, ((0, 0), (0, len(self._buffers) * self._size))) if self._buffers else embeds

    @contextmanager
    def adding(self, embeds: np.ndarray) -> Iterator[None]:
        """While active, passes of one sequence add `embeds` [n, layers · E] to their first n tokens, the layers' numbers side
        by side."""
        if not self._buffers:
            yield
            return
        shape = (len(embeds), self._size)
        self._written = max(self._written, len(embeds))
        try:
            for number, buffer in enumerate(self._buffers.values()):
                buffer.host(shape)[:] = embeds[:, number * self._size : (number + 1) * self._size]
                buffer.push(shape)
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Add nothing from now on; also after a signal handler's exception that ended `adding` early."""
        if not (self._buffers and self._written):
            return
        shape = (self._written, self._size)
        for buffer in self._buffers.values():
            buffer.host(shape)[:] = 0
            buffer.push(shape)
        self._written = 0
