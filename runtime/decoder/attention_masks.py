"""The masks of a pass: one for every kind of attention that the decoder's layers have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ..bundle.manifest import Manifest
from ..engines.base import DTYPES, Engine, View
from ..engines.buffers import HostBuffer
from ..graphs.values import MASKS, attention_masks
from .forward_pass import ForwardPass
from .masks import CausalMask, Seen
from .prompt_chunks import Block
from .token_tree import TokenTree


class AttentionMasks:
    """[batch, heads, width, cache] each: the buffers that all passes share, and what is written there.

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
        bias, read = info.relative_bias, attention_masks(info, range(info.num_layers))
        table = None if bias is None else np.asarray(tensor(bias.tensor))
        max_distance = 128 if bias is None else bias.max_distance
        self._buffers: dict[str, HostBuffer] = {}
        self.causal: dict[str, CausalMask] = {}
        """By the name of the graphs' input."""
        for name in read:
            dtype = _dtype(engine, manifest, name)
            size = info.mask_heads * capacity * max_num_tokens
            self._buffers[name] = HostBuffer(engine, name, size, dtype)
            window = info.sliding_window if name == MASKS["sliding_attention"] else None
            self.causal[name] = CausalMask(
                capacity, info.mask_heads, DTYPES[dtype], table, max_distance, window
            )

    def attach(self, forward_pass: ForwardPass, cache_len: int) -> None:
        """Give a pass its host arrays, and what brings them to the engine."""
        shape = forward_pass.batch, self._info.mask_heads, forward_pass.width, cache_len
        forward_pass.masks = {name: buffer.host(shape) for name, buffer in self._buffers.items()}
        forward_pass.pushes += [(buffer, shape) for buffer in self._buffers.values()]

    def views(self, forward_pass: ForwardPass) -> dict[str, View]:
        """Where the graphs of a pass read each."""
        return {name: self._buffers[name].view(host.shape) for name, host in forward_pass.masks.items()}

    def read_by(self, layers: Iterable[int], shared: Mapping[str, View]) -> dict[str, View]:
        """Of what the graphs of a pass are told, what a graph takes that has the attention of these layers."""
        read = attention_masks(self._info, layers)
        return {name: view for name, view in shared.items() if name in read or name not in self.causal}

    def seen(self, forward_pass: ForwardPass) -> list[tuple[np.ndarray, Seen]]:
        """(host array [heads, width, cache] of the pass's first sequence, what it holds of a chain by its start)."""
        return [
            (host[0], self.causal[name].seen(forward_pass.width, host.shape[3]))
            for name, host in forward_pass.masks.items()
        ]

    def write_prompt(self, forward_pass: ForwardPass, start: int, blocks: Sequence[Block]) -> None:
        """Of a part of a prompt, in slots from `start` on; `blocks` within it see themselves in both directions."""
        for name, host in forward_pass.masks.items():
            causal = self.causal[name]
            causal.chain(host, 0, start, forward_pass.width)
            for first, end in blocks:
                causal.block(host, 0, start, first, end)

    def write_chain(self, forward_pass: ForwardPass, batch_index: int, start: int) -> None:
        """As `CausalMask.chain`."""
        for name, host in forward_pass.masks.items():
            self.causal[name].chain(host, batch_index, start, forward_pass.width)

    def write_tree(self, forward_pass: ForwardPass, batch_index: int, start: int, tree: TokenTree) -> None:
        """As `CausalMask.tree`."""
        for name, host in forward_pass.masks.items():
            self.causal[name].tree(host, batch_index, start, tree)

    def write_node(
        self, forward_pass: ForwardPass, batch_index: int, start: int, tree: TokenTree, node: int
    ) -> None:
        """As `CausalMask.node`."""
        for name, host in forward_pass.masks.items():
            self.causal[name].node(host, batch_index, start, tree, node)


def _dtype(engine: Engine, manifest: Manifest, name: str) -> str:
    """Of a mask as the engine's segments take it."""
    for segment in manifest.segments:
        if any(value.name == name for value in engine.interface(segment).inputs):
            return engine.dtype(segment, name)
    raise AssertionError(f"no segment reads {name}")
