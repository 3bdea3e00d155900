"""What cross-attention looks at: hidden states of a picture or of a text encoder, as keys and values of every decoder
layer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from ..bundle.manifest import Manifest
from ..common.errors import PromptError
from ..engines.base import DTYPES, Engine, View
from ..engines.buffers import HostBuffer
from .kv_cache import KVArena, key_value
from .masks import encoder_mask


class Encoder:
    """Runs `encoder` (where the model has one) and `cross_kv` once per sequence; the K/V live in an arena of their own.

    Without a text encoder the image embeddings go straight into `cross_kv`.

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
        self._encoder_hidden = HostBuffer(engine, "encoder_rows", self._longest * self._size, dtype)
        self._states = self._encoder_hidden
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
        self.arena = KVArena(
            engine,
            [key_value(*self._head)] * self._layers,
            self._dtype,
            self._longest,
            max_batch,
            bucket=1,
            prefix="cross_",
        )
        self._staging: list[tuple[View, View]] = []
        # One per width for passes of the batch, and one per place for the prefill of a single sequence.
        self._cross_masks: dict[tuple[int, int], HostBuffer] = {}
        self._max_batch = max_batch
        self.version = 0
        """Changes whenever a sequence's source does: masks written before are out of date."""

    @property
    def cache_len(self) -> int:
        """Slots per head in the bound views: what bound passes depend on."""
        return self.arena.cache_len

    def reset(self, batch: int) -> None:
        """Start with `batch` sequences that have no source."""
        self.arena.reset(batch)
        self.version += 1

    def add(self) -> None:
        """A further sequence, without a source, in the last place."""
        self.arena.add()
        self.version += 1

    def remove(self, batch_index: int) -> None:
        """Forget sequence `batch_index`; the last one takes its place."""
        self.arena.remove(batch_index)
        self.version += 1

    def stage(self) -> None:
        """The last sequence stands aside (`Decoder.stage`)."""
        self.arena.stage()
        self.version += 1

    def unstage(self) -> None:
        """It is the last one again."""
        self.arena.unstage()
        self.version += 1

    def run(self, batch_index: int, encoder_hidden: np.ndarray) -> None:
        """Encode hidden states [n, E] of sequence `batch_index`, which has nothing yet. Raises `PromptError` for too
        many."""
        engine, arena = self._engine, self.arena
        source = len(encoder_hidden)
        if not 1 <= source <= self._longest:
            raise PromptError(
                f"the prompt and image take {source} rows, the bundle's encoder 1..{self._longest}"
            )
        shape = (1, source, self._size)
        self._encoder_hidden.host(shape)[0] = encoder_hidden
        self._encoder_hidden.push(shape)
        if self._info is not None:
            self._encode(shape)
        arena.lengths[batch_index] = 0
        alone = arena.batch == 1
        if alone:
            arena.cache_len = arena.aligned(source)
        arena.reserve(source, batch_index)
        arena.lengths[batch_index] = source
        self.version += 1
        # A single sequence whose view is as long as its source needs no copy.
        direct = alone and arena.cache_len == source
        targets = (
            [arena.view(i, batch_index, 1) for i in range(self._layers)] if direct else self._staged(source)
        )
        outputs = {}
        for layer, (key, value) in enumerate(targets):
            outputs[f"cross_key.{layer}"], outputs[f"cross_value.{layer}"] = key, value
        engine.bind("cross_kv", {"encoder_states": self._states.view(shape)}, outputs).run()
        if not direct:
            for layer, (key, value) in enumerate(targets):
                arena.store(layer, batch_index, key, value)

    def bindings(self, width: int, first: int, end: int, batch_index: int, batch: int) -> dict[str, View]:
        """`cross_mask` for `width` tokens of sequences batch_index..batch_index + batch − 1, and the K/V of layers
        first..end−1.

        The mask's content is `write_mask`'s.
        """
        arena = self.arena
        inputs = {"cross_mask": self._cross_mask(width, batch_index).view((batch, 1, width, arena.cache_len))}
        for layer in range(first, end):
            inputs[f"cross_key.{layer}"], inputs[f"cross_value.{layer}"] = arena.view(
                layer, batch_index, batch
            )
        return inputs

    def write_mask(self, width: int, batch_index: int, batch: int) -> int:
        """Let `width` tokens of sequences batch_index..batch_index + batch − 1 see each its own source; returns the
        `version` that it is good for."""
        arena, buffer = self.arena, self._cross_mask(width, batch_index)
        shape = (batch, 1, width, arena.cache_len)
        host = buffer.host(shape)
        host[...] = True
        for index in range(batch):
            host[index, :, :, arena.lengths[batch_index + index] :] = False
        buffer.push(shape)
        return self.version

    def _cross_mask(self, width: int, batch_index: int) -> HostBuffer:
        """Where the mask lies: passes of the batch and of a single sequence must not overwrite each other's. (That of
        the first sequence alone is the beginning of the batch's.)"""
        buffer = self._cross_masks.get((width, batch_index))
        if buffer is None:
            size = (1 if batch_index else self._max_batch) * width * self.arena.capacity
            buffer = HostBuffer(self._engine, f"cross_mask.{width}.{batch_index}", size, "bool")
            self._cross_masks[width, batch_index] = buffer
        return buffer

    def _encode(self, shape: tuple[int, int, int]) -> None:
        assert self._info is not None
        source = shape[1]
        mask_shape = (1, self._info.num_heads, source, source)
        if source != self._masked:
            encoder_mask(self._mask.host(mask_shape), [source], self._table, self._max_distance)
            self._mask.push(mask_shape)
            self._masked = source
        inputs = {
            "encoder_rows": self._encoder_hidden.view(shape),
            "encoder_mask": self._mask.view(mask_shape),
        }
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
