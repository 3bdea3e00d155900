"""Runs a bundle's graphs with onnxruntime and plain numpy arrays: caches are copied in and out, nothing is bound.

Independent of the runtime room on purpose: these tests check what the exporter wrote, against PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from vlmexport.runtime.bundle.folder import Bundle

from tests.support.onnx_session import onnx_session


class GraphRunner:
    """Graphs by name, and one set of caches [batch, Hkv, size, D] per layer."""

    def __init__(self, path: Path, batch: int = 1, size: int = 48) -> None:
        self.bundle = Bundle.open(path)
        self.decoder = self.bundle.manifest.decoder
        self.sessions: dict[str, ort.InferenceSession] = {}
        d = self.decoder
        shape = (batch, d.num_kv_heads, size, d.head_dim)
        # Garbage where nothing was written must not matter (finite, as in a real buffer).
        self.caches = {
            f"{kind}_cache.{i}": np.full(shape, 7.5, np.float32)
            for kind in ("key", "value")
            for i in range(d.num_layers)
        }
        self.cross: dict[str, np.ndarray] = {}
        self.batch, self.size = batch, size

    def run(
        self, graph: str, feeds: dict[str, np.ndarray] | None = None, **inputs: np.ndarray
    ) -> dict[str, np.ndarray]:
        """One run; inputs with a dot in their name are passed in `feeds`."""
        if graph not in self.sessions:
            self.sessions[graph] = onnx_session(self.bundle.path / self.bundle.manifest.graphs[graph].file)
        session = self.sessions[graph]
        assert {i.name for i in session.get_inputs()} == {
            v.name for v in self.bundle.manifest.graphs[graph].inputs
        }
        names = [o.name for o in session.get_outputs()]
        outputs: Any = session.run(None, {**(feeds or {}), **inputs})
        return dict(zip(names, outputs, strict=True))

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        """[batch, width] ids → [batch, width, E]."""
        return self.run("embed", token_ids=tokens, embedding_table=self.bundle.tensor("embedding_table"))[
            "hidden"
        ]

    def encode(self, rows: np.ndarray, lengths: np.ndarray | None = None) -> np.ndarray:
        """Encoder and cross keys/values. `lengths` [batch] counts the real rows of each sequence."""
        count = rows.shape[1]
        position = np.arange(count)
        bias = self._bias("encoder", position[None, :], position[None, :], bidirectional=True)
        mask = np.repeat(bias, rows.shape[0], 0)
        self.cross_mask_row = np.ones((rows.shape[0], count), bool)
        if lengths is not None:
            self.cross_mask_row = position[None, :] < lengths[:, None]
            mask = np.where(self.cross_mask_row[:, None, None, :], mask, np.finfo(np.float32).min).astype(
                np.float32
            )
        states = self.run("encoder", encoder_rows=rows, encoder_mask=mask)["encoder_states"]
        self.cross = self.run("cross_kv", encoder_states=states)
        return states

    def cross_over(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Cross keys/values of rows [batch, source, E] that no encoder of the bundle made."""
        self.cross_mask_row = np.arange(rows.shape[1])[None, :] < lengths[:, None]
        self.cross = self.run("cross_kv", encoder_states=rows)

    def forward(
        self, hidden: np.ndarray, write: np.ndarray, query: np.ndarray, key: np.ndarray, visible: np.ndarray
    ):
        """All segments; returns the rows after every segment.

        `query` [batch, width] and `key` [batch, size] are positions, `visible` [batch, width, size] is bool.
        """
        d, results = self.decoder, []
        shared: dict[str, np.ndarray] = {"write_indices": write.astype(np.int64)}
        if d.position == "relative_bias":
            bias = self._bias("decoder", query, key, bidirectional=False)
            shared["attn_mask"] = np.where(visible[:, None], bias, np.finfo(np.float32).min).astype(
                np.float32
            )
        else:
            shared["attn_mask"] = visible[:, None]
        if d.cross_attention:
            shared["cross_mask"] = np.repeat(self.cross_mask_row[:, None, None, :], hidden.shape[1], 2)
        for index, (first, last) in enumerate(zip(d.cuts[:-1], d.cuts[1:], strict=True)):
            feeds = dict(shared, hidden=hidden)
            if d.position == "rotary" or (d.position == "learned" and first == 0):
                feeds["positions"] = query.astype(np.int64)
            for name, value in {**self.caches, **self.cross}.items():
                if first <= int(name.rpartition(".")[2]) < last:
                    feeds[name] = value
            out = self.run(f"segment.{index}", feeds=feeds)
            hidden = out.pop("hidden_out")
            for name, value in out.items():
                self.caches[name.removeprefix("updated_")] = value
            results.append(hidden)
        return results

    def head(self, hidden: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Logits [rows, V] of rows of the flattened [batch × width]."""
        return self.run("head", hidden=hidden, row_index=rows.astype(np.int64))["logits"]

    def _bias(self, stack: str, query: np.ndarray, key: np.ndarray, bidirectional: bool) -> np.ndarray:
        """T5's bias [batch, heads, width, size], as in Mesh TensorFlow's bucket formula."""
        part = self.decoder if stack == "decoder" else self.bundle.manifest.encoder
        assert part is not None and part.relative_bias is not None
        relative = key[:, None, :] - query[:, :, None]
        buckets, distance = part.relative_bias.num_buckets, part.relative_bias.max_distance
        bucket = np.zeros_like(relative)
        if bidirectional:
            buckets //= 2
            bucket += (relative > 0) * buckets
            relative = np.abs(relative)
        else:
            relative = np.maximum(-relative, 0)
        exact = buckets // 2
        with np.errstate(divide="ignore"):
            scale = np.log(relative.astype(np.float32) / exact) / np.log(distance / exact)
        large = exact + np.where(relative < exact, 0, scale * (buckets - exact)).astype(np.int64)
        bucket += np.where(relative < exact, relative, np.minimum(large, buckets - 1))
        table = self.bundle.tensor(part.relative_bias.tensor)
        return np.moveaxis(table[bucket], -1, 1)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    """Largest difference relative to the largest expected value."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(actual - expected).max())
    assert difference <= tolerance * scale, f"largest difference {difference:.2e} at scale {scale:.2f}"
