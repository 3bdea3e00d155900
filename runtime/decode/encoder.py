"""The encoder of an encoder-decoder model and the cross-attention K/V that it leaves for the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import Engine, View
from ..engines.buffers import HostBuffer
from ..errors import PromptError
from .masks import encoder_mask


class Encoder:
    """Runs `encoder` and `cross_kv` once per request; hands the decoder their K/V and the mask over them.

    Args:
        tensor: reads a tensor of the bundle by name. max_batch: most sequences of a request.
    """

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        tensor: Callable[[str], np.ndarray],
        max_batch: int,
    ):
        info, decoder = manifest.encoder, manifest.decoder
        assert info is not None
        self._engine, self._decoder, self._info = engine, decoder, info
        self._longest = manifest.limits.max_source or manifest.limits.max_length
        graph = manifest.graphs["encoder"]
        dtypes = {value.name: value.dtype for value in (*graph.inputs, *graph.outputs)}
        self._size = decoder.hidden_size
        rows = max_batch * self._longest
        self._rows = HostBuffer(engine, "encoder_rows", rows * self._size, dtypes["encoder_rows"])
        self._mask = HostBuffer(
            engine, "encoder_mask", info.num_heads * rows * self._longest, dtypes["encoder_mask"]
        )
        self._states = engine.allocate("encoder_states", (rows, self._size), dtypes["encoder_states"])
        self._cross_masks: dict[int, HostBuffer] = {}  # one per width: each layout keeps its content
        self._max_batch = max_batch
        kinds = {value.name: value for value in manifest.graphs["cross_kv"].outputs}
        self._cross = {
            name: engine.allocate(name, (rows * int(value.shape[1]) * int(value.shape[3]),), value.dtype)
            for name, value in kinds.items()
        }
        self._kinds = kinds
        self._table = None if info.relative_bias is None else np.asarray(tensor(info.relative_bias.tensor))
        self._max_distance = info.relative_bias.max_distance if info.relative_bias else 128
        self._lengths: list[int] = []
        self._source = 0

    def run(self, rows: Sequence[np.ndarray]) -> bool:
        """Encode rows [n_b, E] of each sequence; True when the shapes differ from the request before."""
        engine, batch = self._engine, len(rows)
        lengths = [len(part) for part in rows]
        source = max(lengths)
        if not 1 <= source <= self._longest:
            raise PromptError(
                f"the prompt and image take {source} rows, the bundle's encoder 1..{self._longest}"
            )
        shape = (batch, source, self._size)
        host = self._rows.host(shape)
        for index, part in enumerate(rows):
            host[index, : len(part)] = part
            host[index, len(part) :] = 0
        mask_shape = (batch, self._info.num_heads, source, source)
        changed = lengths != self._lengths
        if changed:
            encoder_mask(self._mask.host(mask_shape), lengths, self._table, self._max_distance)
            self._mask.push(mask_shape)
        self._rows.push(shape)
        self._lengths, self._source = lengths, source
        states = engine.view(self._states, shape)
        encoder = {"encoder_rows": self._rows.view(shape), "encoder_mask": self._mask.view(mask_shape)}
        engine.bind("encoder", encoder, {"encoder_states": states}).run()
        engine.bind(
            "cross_kv", {"encoder_states": states}, {name: self._view(name) for name in self._cross}
        ).run()
        return changed

    def bindings(self, width: int, first: int, end: int) -> dict[str, View]:
        """`cross_mask` for `width` rows and the K/V of layers first..end−1; the mask is the same for every row."""
        shape = (len(self._lengths), 1, width, self._source)
        names = [f"cross_{kind}.{layer}" for layer in range(first, end) for kind in ("key", "value")]
        buffer = self._cross_masks.get(width)
        if buffer is None:
            size = self._max_batch * width * self._longest
            buffer = self._cross_masks[width] = HostBuffer(self._engine, f"cross_mask.{width}", size, "bool")
        host = buffer.host(shape)
        host[...] = True
        for row, length in enumerate(self._lengths):
            host[row, :, :, length:] = False
        buffer.push(shape)
        return {"cross_mask": buffer.view(shape), **{name: self._view(name) for name in names}}

    def _view(self, name: str) -> View:
        heads, size = int(self._kinds[name].shape[1]), int(self._kinds[name].shape[3])
        return self._engine.view(self._cross[name], (len(self._lengths), heads, self._source, size))
