"""What says which slots the tokens of a pass read: a mask for every kind of attention that the decoder's layers have, and
slots for its convolutions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import DTYPES, Engine, View
from ..engines.buffers import HostBuffer
from ..graphs.values import CONV_SLOTS, MASKS, layer_caches, slots_read
from .conv_slots import ChainSlots, ConvSlots
from .forward_pass import ForwardPass
from .masks import CausalMask, Seen
from .prompt_chunks import Block
from .token_tree import TokenTree


class AttentionMasks:
    """Masks [batch, heads, width, cache], and of convolutions slots [batch, width, kernel − 1]: the buffers that all passes
    share, and what is written there.

    A window counts positions, not slots: of a tree's nodes these are not the same.
    """

    def __init__(
        self,
        engine: Engine,
        manifest: Manifest,
        tensor: Callable[[str], np.ndarray],
        capacity: int,
        max_num_tokens: int,
    ):
        """`tensor` reads a bundle's tensor by name; at most `max_num_tokens` tokens per pass, in slots below `capacity`."""
        info = self._info = manifest.decoder
        bias, read = info.relative_bias, slots_read(info, range(info.num_layers))
        table = None if bias is None else np.asarray(tensor(bias.tensor))
        self._slots_per_token = (info.conv_kernel or 1) - 1
        """Of a convolution."""
        max_distance = 128 if bias is None else bias.max_distance
        self._buffers: dict[str, HostBuffer] = {}
        self.causal: dict[str, CausalMask] = {}
        """Masks by the name of the graphs' input."""
        self._written: dict[str, CausalMask | ConvSlots] = {}
        """By the name of the graphs' input, what writes it."""
        for name in read:
            if name == CONV_SLOTS:
                size = self._slots_per_token * max_num_tokens
                self._buffers[name] = HostBuffer(engine, name, size, "int64")
                self._written[name] = ConvSlots(capacity, self._slots_per_token + 1)
                continue
            dtype = _dtype(engine, manifest, name)
            size = info.mask_heads * capacity * max_num_tokens
            self._buffers[name] = HostBuffer(engine, name, size, dtype)
            window = info.sliding_window if name == MASKS["sliding_attention"] else None
            self._written[name] = self.causal[name] = CausalMask(
                capacity, info.mask_heads, DTYPES[dtype], table, max_distance, window,
                whole_blocks=bool(info.whole_blocks),
            )  # fmt: skip

    def attach(self, forward_pass: ForwardPass, cache_len: int) -> None:
        """Give a pass its host arrays, and what brings them to the engine."""
        forward_pass.masks = {}
        for name, buffer in self._buffers.items():
            shape = forward_pass.batch, self._info.mask_heads, forward_pass.width, cache_len
            if name == CONV_SLOTS:
                shape = forward_pass.batch, forward_pass.width, self._slots_per_token
            forward_pass.masks[name] = buffer.host(shape)
            forward_pass.pushes.append((buffer, shape))

    def views(self, forward_pass: ForwardPass) -> dict[str, View]:
        """Where the graphs of a pass read each."""
        return {name: self._buffers[name].view(host.shape) for name, host in forward_pass.masks.items()}

    def read_by(self, layers: Iterable[int], shared: Mapping[str, View]) -> dict[str, View]:
        """Of what the graphs of a pass are told, what a graph takes that has the caches of these layers."""
        layers = list(layers)
        read = {*slots_read(self._info, layers)}
        if any(layer_caches(self._info, layer) for layer in layers):
            read.add("write_indices")
        return {name: view for name, view in shared.items() if name in read}

    def seen(self, forward_pass: ForwardPass) -> list[tuple[np.ndarray, Seen | ChainSlots]]:
        """(host array of the pass's first sequence, what it holds of a chain by its start)."""
        return [
            (host[0], self._written[name].seen(forward_pass.width, host.shape[-1]))
            for name, host in forward_pass.masks.items()
        ]

    def write_prompt(self, forward_pass: ForwardPass, start: int, blocks: Sequence[Block]) -> None:
        """Of a part of a prompt, in slots from `start` on; `blocks` within it see themselves in both directions."""
        for name, host in forward_pass.masks.items():
            written = self._written[name]
            written.chain(host, 0, start, forward_pass.width)
            for first, end in blocks:
                written.block(host, 0, start, first, end)

    def write_chain(self, forward_pass: ForwardPass, batch_index: int, start: int) -> None:
        """As `CausalMask.chain`."""
        for name, host in forward_pass.masks.items():
            self._written[name].chain(host, batch_index, start, forward_pass.width)

    def write_tree(self, forward_pass: ForwardPass, batch_index: int, start: int, tree: TokenTree) -> None:
        """As `CausalMask.tree`."""
        for name, host in forward_pass.masks.items():
            self._written[name].tree(host, batch_index, start, tree)

    def write_node(
        self, forward_pass: ForwardPass, batch_index: int, start: int, tree: TokenTree, node: int
    ) -> None:
        """As `CausalMask.node`."""
        for name, host in forward_pass.masks.items():
            self._written[name].node(host, batch_index, start, tree, node)


def _dtype(engine: Engine, manifest: Manifest, name: str) -> str:
    """Of a mask as the engine's segments take it."""
    for segment in manifest.segments:
        if any(value.name == name for value in engine.interface(segment).inputs):
            return engine.dtype(segment, name)
    raise AssertionError(f"no segment reads {name}")
