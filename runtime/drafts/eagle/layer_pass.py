"""Passes of the graph of an EAGLE layer over a batch, with keys and values of its own at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...decoder.device.draft_chain import Sent
from ...decoder.kv_cache import BATCH_BUCKET, BUCKET, KVArena, key_value
from ...decoder.masks import CausalMask
from ...engines.base import DTYPES, Call, Engine, View
from ...engines.buffers import HostBuffer

if TYPE_CHECKING:
    from ...bundle.manifest import DraftCache
    from ...decoder.decoder import Decoder
    from ...decoder.device.draft_chain import Keep

Proposals = tuple[np.ndarray, np.ndarray]
"""Ids int64 and log-probabilities float32, both [num_logits, ranks]."""


class Beside(Protocol):
    """Inputs of a layer's graph beside those that every such graph has."""

    def begin(self, batch: int, width: int, batch_index: int) -> None:
        """A pass over [batch, width] pairs of sequences in places batch_index.. begins."""
        ...

    def push(self, shape: tuple[int, int]) -> None:
        """Bring what was written for a pass over [batch, width] pairs to the engine."""
        ...

    def views(self, shape: tuple[int, int]) -> dict[str, View]:
        """The inputs of such a pass by name; their addresses never change."""
        ...

    def behind(self, shape: tuple[int, int]) -> dict[str, View]:
        """The same for passes behind the prompt of the sequence in place 0, whose values never change either."""
        ...


def position_axes(engine: Engine, graph: str) -> int:
    """Of the positions that the graph of a layer takes."""
    (shape,) = (value.shape for value in engine.interface(graph).inputs if value.name == "positions")
    return 1 if len(shape) == 2 else int(shape[0])


class EaglePass:
    """The graph bound to buffers: `begin` gives what a pass reads, to be filled; `run` runs it.

    Its inputs [batch, width] are pairs of a feature and the token that follows, in slots start.. of each sequence's
    keys and values. Slots before a sequence's length are valid; a pass may write `max_width` slots beyond it.
    """

    def __init__(
        self,
        name: str,
        graph: str,
        decoder: Decoder,
        cache: DraftCache,
        ranks: int,
        max_hidden: int,
        beside: Beside | None = None,
    ):
        """`max_hidden`: most hidden states of a pass over one prompt."""
        self._beside = beside
        engine, batch = decoder.engine, decoder.arena.max_batch
        self._engine, self._graph, self._ranks, self._name = engine, graph, ranks, name
        self._size, self._dtype = decoder.manifest.decoder.hidden_size, decoder.dtype
        self.arena = KVArena(
            engine, [key_value(cache.num_kv_heads, cache.head_dim)], engine.dtype(graph, "key_cache.0"),
            decoder.arena.capacity, batch, bucket=BUCKET if batch == 1 else BATCH_BUCKET,
            static=engine.static_cache, prefix=f"{name}.",
        )  # fmt: skip
        self.arena.reset(0)
        max_num_tokens = max(max_hidden, batch * decoder.max_width)

        def host(what: str, size: int, dtype: str = "int64") -> HostBuffer:
            return HostBuffer(engine, f"{name}.{what}", size, dtype)

        self._sources, self._next = host("feature_index", max_num_tokens), host("next_ids", max_num_tokens)
        self.axes = position_axes(engine, graph)
        """Of a position: 1, or 3 with M-RoPE."""
        self._positions = host("positions", self.axes * max_num_tokens)
        self._indices = host("write_indices", batch)
        self._row_index, self._mask = (
            host("row_index", max_num_tokens),
            host("attn_mask", max_num_tokens * self.arena.capacity, "bool"),
        )
        self._kinds = {}
        for drafted in (False, True):
            kind = self._kinds[drafted] = host(f"drafted.{drafted}", 1, "bool")
            kind.host((1,))[0] = drafted
            kind.push((1,))
        item = DTYPES[self._dtype].itemsize
        # A level reads the features of the level before and writes its own.
        self._features = [
            engine.allocate(f"{name}.features.{index}", max_num_tokens * self._size * item)
            for index in range(2)
        ]
        self._turn = 0
        self._causal = CausalMask(self.arena.capacity, 1, np.dtype(np.bool_))
        """What the tokens of a chain see, bool [1, width, slots]."""
        num_proposals = batch * decoder.max_width * ranks
        # On a device a pass reads the token of the pass before while it writes its own.
        self._ids, self._others = (
            engine.allocate(f"{name}.{what}", num_proposals * DTYPES["int64"].itemsize)
            for what in ("token_ids", "other_token_ids")
        )
        self._scores = engine.allocate(
            f"{name}.log_probabilities", num_proposals * DTYPES["float32"].itemsize
        )
        self._tables = decoder.embedding.constants
        self._marks_drafted = any(value.name == "drafted" for value in engine.interface(graph).inputs)
        self._calls: dict[tuple[object, ...], tuple[Call, View, View]] = {}
        self._num_features = self._cache_len = 0
        self._shape = (0, 0)

    def begin(
        self, batch: int, width: int, batch_index: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What the next pass over [batch, width] pairs of sequences batch_index.. reads, to be written: indices of its
        features and ids of the tokens that follow (int64 [batch, width]), positions (int64 [batch, axes, width]), first
        slots int64 [batch], and what each pair sees, bool [batch, width, slots]."""
        self._shape = shape = batch, width
        if self._beside is not None:
            self._beside.begin(batch, width, batch_index)
        mask = self._mask.host((batch, 1, width, self.arena.cache_len))[:, 0]
        sources, tokens = (buffer.host(shape) for buffer in (self._sources, self._next))
        return sources, tokens, self.positions(shape), self._indices.host((batch,)), mask

    def positions(self, shape: tuple[int, int]) -> np.ndarray:
        """Those of a pass over [batch, width] pairs, to be written: int64 [batch, axes, width]."""
        host = self._positions.host(self._placed(shape))
        return host[:, None] if self.axes == 1 else host.transpose(1, 0, 2)

    def _placed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the graph's positions of such a pass."""
        return shape if self.axes == 1 else (self.axes, *shape)

    def run(self, features: View | None, row_index: np.ndarray, batch_index: int = 0) -> Proposals:
        """Run it for sequences batch_index..: the proposals after the pairs at `row_index` int64 of [batch × width].

        `features` [n, E] are the target's hidden states before its final norm; None: what the pass before gave.
        """
        shape, mask = self._shape, (self._shape[0], 1, self._shape[1], self.arena.cache_len)
        self._row_index.host(row_index.shape)[:] = row_index
        for buffer in (self._sources, self._next):
            buffer.push(shape)
        self._positions.push(self._placed(shape))
        self._indices.push(shape[:1])
        self._mask.push(mask)
        self._row_index.push(row_index.shape)
        if self._beside is not None:
            self._beside.push(shape)
        drafted = features is None
        if features is None:
            features = self._features[self._turn].view((self._num_features, self._size), self._dtype)
            self._turn = 1 - self._turn
        call, ids, scores = self._bound(features, drafted, batch_index, len(row_index))
        call.run()
        self._num_features = shape[0] * shape[1]
        # The waiting read first: on a device the second one finds everything there.
        return self._engine.read(ids), self._engine.read(scores)

    # --- chains of one sequence that a device drafts by itself ---

    def chain_inputs(
        self,
        width: int,
        count: int,
        start: int,
        positions: np.ndarray,
        row_index: np.ndarray,
        tokens: Items[int],
    ) -> Sent:
        """What `chain` is sent for pairs of features `row_index` int64 [n] with the `tokens` that follow, n ≤ width,
        the first in slot `start`, and for each of the passes behind it; `positions` int64 [axes, n + count − 1] are those
        of the pairs and of these passes."""
        pairs, cache_len = len(row_index), self.arena.cache_len
        ids = np.zeros((1, width), np.int64)
        ids[0, :pairs] = tokens
        sources = np.full((1, width), row_index[0])  # padding repeats a feature of its own sequence
        sources[0, :pairs] = row_index
        places = np.arange(width)
        once = {
            "feature_index": sources,
            "next_ids": ids,
            "last": np.array([pairs - 1]),
            "positions": positions[:, np.minimum(places, pairs - 1)].reshape(self._placed((1, width))),
            "write_indices": np.array([start]),
            "attn_mask": self._causal.seen(width, cache_len)[start][None],
        }
        if count == 1:
            return Sent(once, {})
        ahead = pairs + np.arange(count - 1)
        # A token further is a slot further: the mask rows of one chain are what the passes see one by one.
        seen = self._causal.seen(count - 1, cache_len)[start + pairs]
        each = {
            "positions": positions[:, ahead].T.reshape(count - 1, *self._placed((1, 1))),
            "write_indices": (start + ahead)[:, None],
            "attn_mask": seen[0, :, None, None, None],
        }
        return Sent(once, each)

    def chain(
        self, features: View, width: int, count: int, sent: Mapping[str, View], keep: Keep
    ) -> list[Call]:
        """The calls that draft `count` tokens: a pass over pairs of `features` [n, E], and one for each token after the
        first, which reads what the last pass wrote."""
        engine, size = self._engine, self._size
        calls: list[Call] = []
        keys, values = self.arena.view(0, 0, 1)
        scores = self._scores.view((1, self._ranks), "float32")
        first = engine.constant(f"{self._name}.first", np.zeros((1, 1), np.int64))
        sources, row_index, tokens = sent["feature_index"], sent["last"], sent["next_ids"]
        for step in range(count):
            shape, number = ((1, width), "") if step == 0 else ((1, 1), f".{step - 1}")
            inputs = {
                "hidden": features,
                "feature_index": sources,
                "drafted": self._kinds[step > 0].view((1,)),
                "next_ids": tokens,
                **self._tables,
                **{name: sent[f"{name}{number}"] for name in ("positions", "write_indices", "attn_mask")},
                "row_index": row_index,
                **({} if self._beside is None else self._beside.behind(shape)),
            }
            features = self._features[step % 2].view((shape[1], size), self._dtype)
            outputs = {"hidden_out": features.buffer.view((*shape, size), self._dtype)}
            ids = (self._ids, self._others)[step % 2].view((1, self._ranks), "int64")
            outputs |= {"token_ids": ids, "log_probabilities": scores}
            calls.append(self._call(inputs, outputs, keys, values))
            token, score = (each.buffer.view((1,), each.dtype) for each in (ids, scores))
            calls += keep(step, token, score)
            if step == count - 1:
                break
            tokens = ids.buffer.view((1, 1), "int64")
            sources = row_index.buffer.view((1, 1), "int64", row_index.offset) if step == 0 else first
            row_index = first.buffer.view((1,), "int64")
        return calls

    def _call(self, inputs: dict[str, View], outputs: dict[str, View], keys: View, values: View) -> Call:
        """The graph with these keys and values."""
        inputs |= {"key_cache.0": keys, "value_cache.0": values}
        outputs = outputs | {"updated_key_cache.0": keys, "updated_value_cache.0": values}
        if not self._marks_drafted:
            del inputs["drafted"]
        return self._engine.bind(self._graph, inputs, outputs)

    def _bound(
        self, features: View, drafted: bool, batch_index: int, num_logits: int
    ) -> tuple[Call, View, View]:
        batch, width = self._shape
        cache_len = self.arena.cache_len
        key = (
            features.address,
            features.shape,
            drafted,
            self._turn,
            self._shape,
            cache_len,
            batch_index,
            num_logits,
        )
        result = self._calls.get(key)
        if result is not None:
            return result
        keys, values = self.arena.view(0, batch_index, batch)
        shape, ranked = (batch, width), (num_logits, self._ranks)
        ids, scores = self._ids.view(ranked, "int64"), self._scores.view(ranked, "float32")
        inputs = {
            "hidden": features,
            "feature_index": self._sources.view(shape),
            "drafted": self._kinds[drafted].view((1,)),
            "next_ids": self._next.view(shape),
            **self._tables,
            "positions": self._positions.view(self._placed(shape)),
            "write_indices": self._indices.view((batch,)),
            "attn_mask": self._mask.view((batch, 1, width, cache_len)),
            "row_index": self._row_index.view((num_logits,)),
            **({} if self._beside is None else self._beside.views(shape)),
        }
        outputs = {
            "hidden_out": self._features[self._turn].view((batch, width, self._size), self._dtype),
            "token_ids": ids,
            "log_probabilities": scores,
        }
        bound = self._call(inputs, outputs, keys, values)
        if cache_len != self._cache_len:  # the views of shorter or longer caches are gone
            self._calls.clear()
            self._cache_len = cache_len
        result = self._calls[key] = bound, ids, scores
        return result
