"""A bundle of a Llama-like model of 2 layers whose graphs are written by hand and run; and what it says, by numpy.

Needs the package onnx alone, so that it is there where the exporter has no wheels (Python 3.10).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests.support import handmade_bundle

HEADS, SIZE, WIDTH, PLACES = 2, 4, 8, 128
SCALE, EPSILON = SIZE**-0.5, 1e-6
TYPES = {"float32": onnx.TensorProto.FLOAT, "int64": onnx.TensorProto.INT64, "bool": onnx.TensorProto.BOOL}


class Weights:
    """Of the model. `rows` is the embedding table [V, WIDTH]; products are `x @ w`."""

    def __init__(self, vocabulary: int, seed: int = 3) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)

        self.rows = 2 * matrix(WIDTH, vocabulary).T.copy()
        self.head = 3 * matrix(WIDTH, vocabulary)
        self.layers = [
            {
                **{name: matrix(WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
                "up": matrix(WIDTH, 16),
                "down": matrix(16, WIDTH),
            }
            for _ in range(2)
        ]
        self.imitation = 0.5 * matrix(WIDTH, WIDTH)
        angles = np.arange(PLACES)[:, None] * np.array([1.0, 0.1])
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Graph:
    """Nodes and constants of one graph."""

    def __init__(self, name: str, info: dict[str, Any]) -> None:
        self.name, self.info = name, info
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}

    def node(self, op: str, inputs: Sequence[str | np.ndarray], output: str = "", **attributes: Any) -> str:
        """An operator over values and constants; the name of what it makes."""
        names = []
        for given in inputs:
            if isinstance(given, np.ndarray):
                names.append(f"c{len(self.constants)}")
                self.constants[names[-1]] = given
            else:
                names.append(given)
        output = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [output], **attributes))
        return output

    def save(self, folder: Path) -> None:
        inputs, outputs = (
            [
                helper.make_tensor_value_info(value["name"], TYPES[value["dtype"]], value["shape"])
                for value in self.info[side]
            ]
            for side in ("inputs", "outputs")
        )
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, self.name, inputs, outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        onnx.checker.check_model(model)
        onnx.save(model, str(folder / self.info["file"]))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def norm(graph: Graph, rows: str) -> str:
    return graph.node("RMSNormalization", [rows, np.ones(WIDTH, np.float32)], epsilon=EPSILON)


def segment(graph: Graph, weights: Weights, layer: int) -> None:
    """One layer over its cache."""
    w, cache = weights.layers[layer], {}
    rows = norm(graph, "hidden")
    split = {}
    for name in ("q", "k", "v"):
        product = graph.node("MatMul", [rows, w[name]])
        by_head = graph.node("Reshape", [product, ints(0, 0, HEADS, SIZE)])
        split[name] = graph.node("Transpose", [by_head], perm=[0, 2, 1, 3])
    angles = [graph.node("Gather", [table, "positions"], axis=0) for table in (weights.cos, weights.sin)]
    for name in ("q", "k"):
        split[name] = graph.node("RotaryEmbedding", [split[name], *angles])
    for kind, name in (("key", "k"), ("value", "v")):
        given = f"{kind}_cache.{layer}"
        cache[kind] = graph.node(
            "TensorScatter", [given, split[name], "write_indices"], f"updated_{given}", axis=2
        )
    seen = graph.node("Attention", [split["q"], cache["key"], cache["value"], "attn_mask"], scale=SCALE)
    joined = graph.node("Reshape", [graph.node("Transpose", [seen], perm=[0, 2, 1, 3]), ints(0, 0, WIDTH)])
    rows = graph.node("Add", ["hidden", graph.node("MatMul", [joined, w["o"]])])
    up = graph.node("Relu", [graph.node("MatMul", [norm(graph, rows), w["up"]])])
    graph.node("Add", [rows, graph.node("MatMul", [up, w["down"]])], "hidden_out")


def head(graph: Graph, weights: Weights) -> None:
    rows = graph.node("Gather", [graph.node("Reshape", ["hidden", ints(-1, WIDTH)]), "row_index"], axis=0)
    graph.node("MatMul", [norm(graph, rows), weights.head], "logits")


def commit(graph: Graph) -> None:
    index = graph.node("Unsqueeze", ["source_rows", ints(1, 3)])
    index = graph.node("Expand", [index, ints(1, HEADS, 1, SIZE)])
    for layer in range(2):
        for kind in ("key", "value"):
            cache = f"{kind}_cache.{layer}"
            taken = graph.node("GatherElements", [cache, index], axis=2)
            graph.node("TensorScatter", [cache, taken, "write_indices"], f"updated_{cache}", axis=2)


def mask(graph: Graph) -> None:
    """See `exporter/graphs/mask.py`."""
    at = graph.node(
        "Sub", [graph.node("Unsqueeze", ["slots", ints(0)]), graph.node("Unsqueeze", ["start", ints(1)])]
    )
    span = graph.node("Shape", ["ancestors"], start=2, end=3)
    inside = graph.node("Min", [graph.node("Max", [at, ints(0)]), graph.node("Sub", [span, ints(1)])])
    shape = graph.node("Concat", [graph.node("Shape", ["depths"]), graph.node("Shape", ["slots"])], axis=0)
    by_row = graph.node("Expand", [graph.node("Unsqueeze", [inside, ints(1)]), shape])
    related = graph.node("GatherElements", ["ancestors", by_row], axis=2)
    own = graph.node("Unsqueeze", [graph.node("Less", [at, span]), ints(1)])
    before = graph.node("Unsqueeze", [graph.node("Less", [at, ints(0)]), ints(1)])
    visible = graph.node("Or", [graph.node("And", [related, own]), before])
    graph.node("Unsqueeze", [visible, ints(1)], "attn_mask")
    graph.node("Add", [graph.node("Unsqueeze", ["first_positions", ints(1)]), "depths"], "positions")


def write(folder: Path) -> tuple[Path, Weights]:
    """The bundle in a new folder, and its weights."""
    folder.mkdir(parents=True)
    tokenizer = handmade_bundle.byte_level_tokenizer()
    data = handmade_bundle.manifest(tokenizer, "llama")
    data["graphs"]["mask"] = {"file": "mask.onnx", "role": "mask", "inputs": [], "outputs": []}
    handmade_bundle._add_interfaces(data)
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = Weights(tokenizer.get_vocab_size())
    (folder / "weights.bin").write_bytes(weights.rows.tobytes().ljust(data["weights"]["bytes"], b"\0"))
    for name, info in data["graphs"].items():
        graph = Graph(name, info)
        if name == "embed":
            graph.node("Gather", ["embedding_table", "token_ids"], "hidden", axis=0)
        elif name.startswith("segment"):
            segment(graph, weights, int(name[-1]))
        elif name == "head":
            head(graph, weights)
        elif name == "commit":
            commit(graph)
        elif name == "mask":
            mask(graph)
        else:
            assert name == "imitation.1", name
            made = graph.node("MatMul", ["hidden", weights.imitation])
            graph.node("Add", ["hidden", made], "hidden_out")
        graph.save(folder)
    handmade_bundle.write_manifest(folder, data | {"files": handmade_bundle.list_files(folder)})
    return folder, weights


def greedy(weights: Weights, prompt: Sequence[int], count: int) -> list[int]:
    """`count` likeliest tokens behind a prompt: the whole text anew for each, in float64, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        rows = weights.rows[ids].astype(np.float64)
        for w in weights.layers:
            n, length = normed(rows), len(ids)
            q, k, v = (
                (n @ w[name]).reshape(length, HEADS, SIZE).transpose(1, 0, 2) for name in ("q", "k", "v")
            )
            scores = turned(weights, q) @ turned(weights, k).transpose(0, 2, 1) * SCALE
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            seen = (shares / shares.sum(-1, keepdims=True)) @ v
            rows = rows + seen.transpose(1, 0, 2).reshape(length, WIDTH) @ w["o"]
            rows = rows + np.maximum(normed(rows) @ w["up"], 0) @ w["down"]
        ids.append(int((normed(rows[-1]) @ weights.head).argmax()))
    return ids[len(prompt) :]


def normed(rows: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPSILON)


def turned(weights: Weights, rows: np.ndarray) -> np.ndarray:
    """Rotary positions from 0 on; [heads, length, SIZE], halves turned together."""
    one, other = np.split(rows, 2, axis=-1)
    cos, sin = (table[: rows.shape[1]] for table in (weights.cos, weights.sin))
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
