"""What cross-attention looks at: rows of a picture or of a text encoder, as keys and values of every decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import DTYPES, Engine, View
from ..engines.buffers import HostBuffer
from ..errors import PromptError
from .kv import KVArena
from .masks import encoder_mask


class Encoder:
    """Runs `encoder` (where the model has one) and `cross_kv` once per sequence; the K/V live in an arena of their own.

    Without a text encoder the image rows go straight into `cross_kv`.

    Args:
        tensor: reads a tensor of the bundle by name. max_batch: most sequences decoded together.
    """

    def __init__(
        self, engine: Engine, manifest: Manifest, tensor: Callable[[str], np.ndarray], max_batch: int
    ):
        info, decoder = manifest.encoder, manifest.decoder
        self._engine, self._info = engine, info
        self._longest = manifest.limits.max_source or manifest.limits.max_length
        self._size = decoder.hidden_size
        self._head = (decoder.num_heads, decoder.head_dim)
        self._layers = decoder.num_layers
        self._dtype = engine.dtype("cross_kv", "cross_key.0")
        dtype = engine.dtype("cross_kv", "encoder_states")
        self._rows = HostBuffer(engine, "encoder_rows", self._longest * self._size, dtype)
        self._states = self._rows
        if info is not None:
            self._states = HostBuffer(engine, "encoder_states", self._longest * self._size, dtype)
            self._mask = HostBuffer(
                engine,
                "encoder_mask",
                info.num_heads * self._longest**2,
                engine.dtype("encoder", "encoder_mask"),
            )
            bias = info.relative_bias
            self._table = None if bias is None else np.asarray(tensor(bias.tensor))
            self._max_distance = 128 if bias is None else bias.max_distance
        self._masked = 0  # source length that the encoder mask was written for
        # Sequences lie one behind the other, and each is bound by itself while it is prefilled.
        row = prod(self._head) * DTYPES[self._dtype].itemsize
        self._unit = 1 if max_batch == 1 else engine.alignment // gcd(engine.alignment, row)
        self.arena = KVArena(
            engine,
            self._layers,
            *self._head,
            self._dtype,
            self._rounded(self._longest),
            max_batch,
            bucket=self._unit,
            prefix="cross_",
        )
        self._staging: list[tuple[View, View]] = []
        self._cross_masks: dict[int, HostBuffer] = {}  # one per width: each layout keeps its content
        self._max_batch = max_batch

    @property
    def layout(self) -> tuple[int, tuple[int, ...]]:
        """What bound passes and their masks depend on: the rows per head, and the lengths of the batch."""
        return self.arena.rows, tuple(self.arena.lengths[: self.arena.batch])

    def run(self, row: int, rows: np.ndarray) -> None:
        """Encode rows [n, E] of sequence `row`, which has nothing yet. Raises `PromptError` for too many."""
        engine, arena = self._engine, self.arena
        source = len(rows)
        if not 1 <= source <= self._longest:
            raise PromptError(
                f"the prompt and image take {source} rows, the bundle's encoder 1..{self._longest}"
            )
        shape = (1, source, self._size)
        self._rows.host(shape)[0] = rows
        self._rows.push(shape)
        if self._info is not None:
            self._encode(shape)
        arena.lengths[row] = 0
        alone = arena.batch == 1
        if alone:
            arena.rows = self._rounded(source)
        arena.reserve(source, row)
        arena.lengths[row] = source
        # A single sequence whose view is as long as its source needs no copy.
        direct = alone and arena.rows == source
        targets = [arena.view(i, row, 1) for i in range(self._layers)] if direct else self._staged(source)
        outputs = {}
        for layer, (key, value) in enumerate(targets):
            outputs[f"cross_key.{layer}"], outputs[f"cross_value.{layer}"] = key, value
        engine.bind("cross_kv", {"encoder_states": self._states.view(shape)}, outputs).run()
        if not direct:
            for layer, (key, value) in enumerate(targets):
                arena.store(layer, row, key, value)

    def bindings(self, width: int, first: int, end: int, row: int, batch: int) -> dict[str, View]:
        """`cross_mask` for `width` rows of sequences row..row + batch − 1, and the K/V of layers first..end−1."""
        arena = self.arena
        shape = (batch, 1, width, arena.rows)
        # Prefill of one sequence and passes of the batch must not overwrite each other's mask.
        key = width if row == 0 else -width
        buffer = self._cross_masks.get(key)
        if buffer is None:
            size = self._max_batch * width * self.arena.capacity
            buffer = self._cross_masks[key] = HostBuffer(self._engine, f"cross_mask.{key}", size, "bool")
        host = buffer.host(shape)
        host[...] = True
        for index in range(batch):
            host[index, :, :, arena.lengths[row + index] :] = False
        buffer.push(shape)
        found = {"cross_mask": buffer.view(shape)}
        for layer in range(first, end):
            found[f"cross_key.{layer}"], found[f"cross_value.{layer}"] = arena.view(layer, row, batch)
        return found

    def _rounded(self, rows: int) -> int:
        """Rows per head with which every sequence of the arena starts at an address that the engine can bind."""
        return -(-rows // self._unit) * self._unit

    def _encode(self, shape: tuple[int, int, int]) -> None:
        assert self._info is not None
        source = shape[1]
        mask_shape = (1, self._info.num_heads, source, source)
        if source != self._masked:
            encoder_mask(self._mask.host(mask_shape), [source], self._table, self._max_distance)
            self._mask.push(mask_shape)
            self._masked = source
        inputs = {"encoder_rows": self._rows.view(shape), "encoder_mask": self._mask.view(mask_shape)}
        self._engine.bind("encoder", inputs, {"encoder_states": self._states.view(shape)}).run()

    def _staged(self, source: int) -> list[tuple[View, View]]:
        heads, size = self._head
        if not self._staging:
            count = prod((heads, self._longest, size)) * DTYPES[self._dtype].itemsize
            for layer in range(self._layers):
                key, value = (
                    self._engine.allocate(f"staged_{kind}.{layer}", count).view((count,), "uint8")
                    for kind in ("key", "value")
                )
                self._staging.append((key, value))
        shape = (1, heads, source, size)
        return [
            (key.buffer.view(shape, self._dtype), value.buffer.view(shape, self._dtype))
            for key, value in self._staging
        ]
