"""One model on one engine, driven through the runtime's decoder, next to its oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vlmexport.runtime.decoder.decoder import Decoder
from vlmexport.runtime.decoder.logits import TargetLogits
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.engines.calls import BoundCalls
from vlmexport.runtime.engines.onnxruntime import OnnxRuntimeCpu
from vlmexport.runtime.families.mrope import Span, positions
from vlmexport.runtime.session.widths import open_decoder
from vlmexport.runtime.speculative.proposer import Picture

from tests.support.engines.emulated import Asked, Emulated, EmulatedCuda
from tests.support.engines.narrow_rounding import NarrowRounding
from tests.support.engines.portable import Portable
from tests.support.engines.recording_device import GrowingDevice, RecordingDevice
from tests.support.engines.torch_reference import TorchReference
from tests.support.oracle import Oracle, Request
from tests.support.scratch import spoil_scratch
from tests.support.tiny_bundles import EVERY_FAMILY, TinyBundle


def _cpu(tiny: TinyBundle) -> OnnxRuntimeCpu:
    return OnnxRuntimeCpu(tiny.path, tiny.bundle.manifest)


ENGINES: dict[str, Callable[[TinyBundle, Oracle], Any]] = {
    "torch": lambda tiny, oracle: TorchReference(tiny.bundle.manifest, oracle.model, tiny.networks()),
    "onnxruntime": lambda tiny, oracle: _cpu(tiny),
    "device": lambda tiny, oracle: RecordingDevice(tiny.bundle.manifest, _cpu(tiny)),
    "growing-device": lambda tiny, oracle: GrowingDevice(tiny.bundle.manifest, _cpu(tiny)),
    "portable": lambda tiny, oracle: RecordingDevice(
        tiny.bundle.manifest, Portable(tiny.path, tiny.bundle.manifest)
    ),
    "cuda": lambda tiny, oracle: EmulatedCuda(tiny.path, tiny.bundle.manifest),
    "tensorrt": lambda tiny, oracle: Emulated.of(tiny.path, tiny.bundle.manifest),
    "tensorrt-portable": lambda tiny, oracle: Emulated.of(tiny.path, tiny.bundle.manifest, "portable"),
}
"""The columns. A new engine is one line here."""

FLOAT_WEIGHTS = "float-weights"
"""Computes what the oracle computes: integers become floats, and no row is rounded to 8 bits."""

LEAST = 3
"""Width from which on the engine `narrow-rounding` gives the same numbers."""

INTEGER_ENGINES: dict[str, Callable[[TinyBundle, Oracle], Any]] = {
    FLOAT_WEIGHTS: lambda tiny, oracle: OnnxRuntimeCpu(tiny.path, tiny.bundle.manifest, float_weights=True),
    "narrow-rounding": lambda tiny, oracle: NarrowRounding(tiny.path, tiny.bundle.manifest, least=LEAST),
    "narrow-rounding-device": lambda tiny, oracle: RecordingDevice(
        tiny.bundle.manifest, NarrowRounding(tiny.path, tiny.bundle.manifest, least=LEAST)
    ),
}
"""Further columns, of bundles with integer weights alone."""

DEVICES = (RecordingDevice, Asked)
"""Engines with a queue, whose memory a test can spoil."""

FAMILIES = (
    *EVERY_FAMILY,
    "t5-float16",
    "llama-bfloat16",
)
"""Names in `tiny_bundles.BUNDLES`, each with a `-two-cuts` variant; a precision stands
behind a family's name, and the oracle then has the rounded weights."""

RELATIVE = 2e-5
"""Tolerance as a part of the largest logit: float32 has 6e-8, sums over a hundred terms in another order through two
layers with sharp attention cost about 1e-6 (measured); any error of masks, positions or cache rows costs 1e-2 or more."""


def close(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Asserts equal greedy tokens and logits within `RELATIVE`; [rows, V] each."""
    assert got.shape == want.shape, f"{what}: logits {got.shape}, wanted {want.shape}"
    assert np.isfinite(got).all(), f"{what}: logits are not finite"
    worst, scale = np.abs(got - want).max(axis=-1), np.abs(want).max()
    assert worst.max() <= RELATIVE * scale, (
        f"{what}: row {int(worst.argmax())} of {len(worst)} differs by {worst.max():.2e}, scale {scale:.1f}; by row {worst}"
    )
    assert got.argmax(-1).tolist() == want.argmax(-1).tolist(), f"{what}: other greedy tokens"


class Rig:
    """See the module."""

    def __init__(
        self, tiny: TinyBundle, engine: str, oracle: Oracle | Any, max_batch: int | None = None
    ) -> None:
        """`max_batch`: as many as the bundle allows unless it is given."""
        self.tiny, self.oracle, self.column = tiny, oracle, engine
        self.manifest = tiny.bundle.manifest
        self.engine = (ENGINES | INTEGER_ENGINES)[engine](tiny, oracle)
        self.max_batch = max_batch or self.manifest.limits.max_batch
        self.least_width: int | None = None
        """What passes are padded to, of a bundle with integer weights; it is measured once."""
        self.fresh()

    def fresh(self) -> Rig:
        """A new decoder (new buffers) on the same engine, which forgets the calls that hold the buffers of the one before."""
        if isinstance(self.engine, DEVICES):
            self.settle()  # what waits in a device's queue holds the engine, and buffers that are freed at its end
            self.engine = self.engine.renewed()
        elif isinstance(calls := getattr(self.engine, "_calls", None), BoundCalls):
            calls.clear()
        self.decoder = self._open()
        if isinstance(self.engine, DEVICES):
            spoil_scratch(self.decoder, self.engine)
        return self

    def _open(self) -> Decoder:
        bundle = self.tiny.bundle
        if self.manifest.target_weights is not None and self.column != FLOAT_WEIGHTS:
            if self.least_width is None:
                found, decoder = open_decoder(bundle, self.engine, None, self.max_batch)
                self.manifest, self.least_width = found.manifest, decoder.passes.least_width
                return decoder
            decoder = Decoder(self.engine, self.manifest, bundle.tensor, max_batch=self.max_batch)
            decoder.set_least_width(self.least_width)
            return decoder
        return Decoder(self.engine, self.manifest, bundle.tensor, max_batch=self.max_batch)

    def settle(self) -> None:
        """Let a device do what is still queued, so that its checks have seen everything."""
        if isinstance(self.engine, DEVICES):
            self.engine.settle()

    @property
    def limits(self) -> Any:
        return self.manifest.limits

    @property
    def image_token(self) -> int:
        """Stands for a row of a picture."""
        found = self.manifest.text.image_token_id
        assert found is not None
        return found

    def request(self, seed: int, length: int = 7) -> Request:
        """A prompt of `length` ordinary tokens, with an image where the family takes one, of a size that depends on the
        seed where the tower takes several."""
        rng = np.random.default_rng(seed)
        text, tower = self.manifest.text, self.tiny.family.vision
        ids = rng.integers(3, text.vocab_size - 4, length).tolist()
        if tower is None:
            return Request(tuple(ids))
        drawn, count = tower.random(torch.Generator().manual_seed(seed), seed)
        vision = {name: value.numpy() for name, value in drawn.items()}
        if self.manifest.decoder.cross_attention and self.manifest.encoder is None:
            return Request((text.pad_token_id or 0,) * count, vision)
        # Some of the text sees all of itself, too, the rest what is before it.
        prefix = count + 2 if self.tiny.family.whole_prompt else None
        return Request((*[self.image_token] * count, *ids, *text.eos_token_ids[:1]), vision, prefix)

    def vision(self, request: Request) -> list[dict[str, np.ndarray]]:
        """Inputs of each run of the `vision` graph."""
        tower = self.tiny.family.vision
        assert request.vision is not None and tower is not None
        return tower.runs(request.vision)

    def image_rows(self, request: Request) -> int:
        """Rows of the picture in front of the prompt."""
        return request.token_ids.count(self.manifest.text.image_token_id)

    def positions(self, request: Request, count: int) -> np.ndarray | None:
        """Of the first `count` rows, where they do not just count."""
        if self.manifest.decoder.position != "mrope":
            first = self.tiny.family.first_position
            return np.arange(first, first + count)[None] if first else None
        assert request.vision is not None and self.manifest.image is not None
        merge = self.manifest.image.extra["merge_size"]
        frames, down, across = request.vision["image_grid_thw"][0].tolist()
        return positions(count, [Span(0, frames, down // merge, across // merge)])

    def blocks(self, request: Request) -> list[tuple[int, int]]:
        """Rows of the prompt that see each other in both directions."""
        inputs = {"input_ids": torch.tensor([request.token_ids])}
        if request.prefix is not None:
            inputs["token_type_ids"] = (torch.arange(len(request.token_ids))[None] >= request.prefix).long()
        found = self.tiny.family.blocks(inputs)
        return found[0] if found else []

    def pictures(self, request: Request) -> np.ndarray | None:
        """Rows [n, E] of the picture in front of the prompt."""
        return None if request.vision is None else self.decoder.image_embeds(self.vision(request))

    def source(self, request: Request) -> np.ndarray:
        """Prompt rows [n, E] with the image rows in their place."""
        image = self.pictures(request)
        slots = None if image is None else np.arange(len(image))
        return self.decoder.embed(np.array(request.token_ids, np.int64), image, slots)

    def first_ids(self, request: Request) -> list[int]:
        """What the decoder itself is prefilled with: the prompt, or the start token after an encoder."""
        if self.manifest.decoder.cross_attention:
            start = self.manifest.text.decoder_start_token_id
            assert start is not None
            return [start]
        return list(request.token_ids)

    def start(self, request: Request, tokens: Sequence[int] = ()) -> np.ndarray:
        """Prefill with the request and `tokens` after it; logits [1, V]."""
        decoder, rows = self.decoder, self.source(request)
        decoder.reset(1)
        if self.manifest.decoder.cross_attention:
            decoder.encode(0, rows)
            rows = decoder.embed(np.array([*self.first_ids(request), *tokens], np.int64))
        elif tokens:
            rows = np.concatenate([rows, decoder.embed(np.array(tokens, np.int64))])
        positions, blocks = self.positions(request, len(rows)), self.blocks(request)
        return decoder.prefill(rows, 0, positions, blocks=blocks).logits(0)[None].copy()

    def join(self, request: Request, sequence: Any = None) -> TargetLogits:
        """Prefill a further sequence of the batch; its proposer sees the prompt's rows if it wants them."""
        decoder, on_rows = self.decoder, None
        if sequence is not None and sequence.proposer is not None and sequence.proposer.needs_prompt_hidden:
            on_rows = lambda slot, rows: sequence.proposer.on_hidden_states(sequence, slot, rows)  # noqa: E731
        if sequence is not None and sequence.proposer is not None and sequence.proposer.needs_pictures:
            image = self.pictures(request)
            if image is not None:  # what enters the decoder, without what is added behind layers
                image = image[:, : self.manifest.decoder.hidden_size]
            sequence.proposer.on_pictures(sequence, [] if image is None else [Picture(0, image[None])])
        row, rows = decoder.add(), self.source(request)
        if self.manifest.decoder.cross_attention:
            decoder.encode(row, rows)
            rows = decoder.embed(np.array(self.first_ids(request), np.int64))
        positions = self.positions(request, len(rows))
        if sequence is not None:
            sequence.prompt_positions = positions
        return decoder.prefill(rows, row, positions, on_rows, self.blocks(request))

    def start_batch(self, requests: Sequence[Request]) -> None:
        """A ragged batch without its prompts: the first `full` pass carries them (`batch_ids`). Image rows in front of
        a decoder's prompt are prefilled, for a pass over tokens cannot carry them."""
        self.decoder.reset(len(requests))
        for row, request in enumerate(requests):
            if self.manifest.decoder.cross_attention:
                self.decoder.encode(row, self.source(request))
            elif request.vision is not None:
                count = self._prefilled(request)
                positions, blocks = self.positions(request, count), self.blocks(request)
                self.decoder.prefill(self.source(request)[:count], row, positions, blocks=blocks)

    def batch_ids(self, request: Request) -> list[int]:
        """What the first pass over a batch carries of a request."""
        ids = self.first_ids(request)
        if request.vision is None or self.manifest.decoder.cross_attention:
            return ids
        return ids[self._prefilled(request) :]

    def _prefilled(self, request: Request) -> int:
        """Rows of a prompt that a pass over tokens cannot carry: pictures, and what sees them before they see it."""
        return request.prefix or self.image_rows(request)

    def full(self, *trees: TokenTree) -> list[np.ndarray]:
        """One pass over all segments; logits [nodes, V] per sequence."""
        width = max(len(tree) for tree in trees)
        self.decoder.begin_cycle(width)
        self.decoder.full(*trees)
        return self._node_logits(trees)

    def speculate(self, cut: int, tokens: Sequence[int]) -> np.ndarray:
        """Trunk over `tokens` one by one, then the tail over the saved rows; logits [len(tokens), V]."""
        return self.speculate_batch(cut, [TokenTree.chain(list(tokens))])[0]

    def speculate_batch(self, cut: int, trees: Sequence[TokenTree]) -> list[np.ndarray]:
        """Trunk over the nodes of every tree in step, then one tail; logits [nodes, V] per sequence."""
        decoder = self.decoder
        steps = max(map(len, trees))
        decoder.begin_cycle(steps)
        for step in range(steps):
            tokens = [tree.tokens[min(step, len(tree) - 1)] for tree in trees]
            decoder.trunk(cut, tokens, None if all(tree.is_chain for tree in trees) else trees)
        decoder.tail(cut, steps, trees)
        return self._node_logits(trees)

    def _node_logits(self, trees: Sequence[TokenTree]) -> list[np.ndarray]:
        """What the head says of the last pass; logits [nodes, V] per sequence."""
        rows, found, first = self.decoder.head_of(trees), [], 0
        for tree in trees:
            found.append(np.stack([rows.logits(first + node) for node in range(len(tree))]))
            first += len(tree)
        return found

    def chain(self, tokens: Sequence[int]) -> np.ndarray:
        """A chain through all segments in one pass; logits [len(tokens), V]."""
        return self.full(TokenTree.chain(list(tokens)))[0]

    def accept(self, tree: TokenTree, path: Sequence[int], row: int = 0) -> None:
        """Keep the root and `path`."""
        self.decoder.accept(tree, list(path), row)
