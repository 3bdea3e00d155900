"""The `process` graph: what a request changes of logits, computed where they lie.

A device that processes logits itself hands over best tokens, not logits, also where tokens are penalised or suppressed.
Engines in host memory do without this graph (`runtime/speculate/processors.py` says what it computes).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .compose import Composer
from .weights import WeightStore


def build_process(store: WeightStore) -> ir.Model:
    """Logits of nodes of a tree → the same after repetition penalty and suppressed tokens.

    Row i is penalised for every token with a mark in `seen` (above 0), for the `recent` ones, which have none yet, and for
    `tokens` [j] where `ancestors` [i, j]. `seen_now` are the marks with those of `recent`. `banned` tokens come last.
    """
    graph = Composer("process", store, "process")

    def ints(*values: int) -> ir.Value:
        return graph.constant(np.array(values, np.int64))

    def number(value: float) -> ir.Value:
        return graph.constant(np.array(value, np.float32))

    raw, seen, banned = (graph.input(name) for name in ("raw_logits", "seen", "banned"))
    penalty, recent = graph.input("penalty"), graph.input("recent")
    tokens, ancestors = graph.input("tokens"), graph.input("ancestors")
    one = graph.node("Expand", [number(1.0), graph.node("Shape", [recent])])
    now = graph.node("ScatterElements", [seen, recent, one], "now", axis=0)
    graph.output("seen_now", now)
    # A node that is no ancestor counts as the root, which is one of every row.
    root = graph.node("Slice", [tokens, ints(0), ints(1)])
    path = graph.node("Where", [ancestors, tokens, root], "path")
    marks = graph.node("Expand", [now, graph.node("Shape", [raw])])
    ones = graph.node("Expand", [number(1.0), graph.node("Shape", [path])])
    marks = graph.node("ScatterElements", [marks, path, ones], "marks", axis=1)
    negative = graph.node("Less", [raw, number(0.0)])
    scaled = graph.node(
        "Where", [negative, graph.node("Mul", [raw, penalty]), graph.node("Div", [raw, penalty])]
    )
    said = graph.node("Where", [graph.node("Less", [number(0.0), marks]), scaled, raw])
    graph.output("logits", graph.node("Where", [banned, number(float(np.finfo(np.float32).min)), said]))
    return graph.model()
