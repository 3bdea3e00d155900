"""The graphs `penalties` and `repeats`: what a request changes of logits, computed where they lie.

A device that processes logits itself hands over best tokens, not logits, also where tokens are penalised or forbidden.
Engines in host memory do without these graphs (`runtime/sampling/logits_processors.py` says what they compute).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ...runtime.bundle.manifest import Limits
from ...runtime.graphs.text_layout import CONTEXT, NOTHING, TextLayout
from .composer import Composer
from .weights import WeightStore


def build_changes(store: WeightStore, limits: Limits, vocabulary: int, *, repeats: bool = False) -> ir.Model:
    """Logits of nodes of a tree → the same after repetition penalty, suppressed tokens and ends that are held back; with
    `repeats` also after repeated n-grams and words that must not come.

    `said` is the text as `runtime/graphs/text_layout.py` lays it out, without the tokens that came since the last cycle: the last
    ones are `recent`, and the one at `end` is the root of the tree. Node j of the tree has `tokens` [j] and stands
    `token_depths` [j] behind the root; row i is a node that stands `depths` [i] behind it, and its text are the nodes where
    `ancestors` [i, j]. `said_now` is the text that the next cycle finds. Where a depth is below `held` no token of `ends`
    comes, and `banned` ones never do.

    `needed` says of every place behind the lead how many tokens before it must be the last ones of a row's text for its own
    token to be forbidden there; more than `CONTEXT`: it never is. An n-gram that was said and a word that must not come
    differ in nothing else.
    """
    layout, most = TextLayout.of(limits), limits.max_width
    name = "repeats" if repeats else "penalties"
    graph = Composer(name, store, name)

    def ints(*values: int) -> ir.Value:
        return graph.constant(np.array(values, np.int64))

    def number(value: float) -> ir.Value:
        return graph.constant(np.array(value, np.float32))

    def part(values: ir.Value, first: int, end: int, axis: int = 1) -> ir.Value:
        return graph.node("Slice", [values, ints(first), ints(end), ints(axis)])

    raw, said, recent, end = (graph.input(name) for name in ("raw_logits", "said", "recent", "end"))
    tokens, token_depths, ancestors = (graph.input(name) for name in ("tokens", "token_depths", "ancestors"))
    depths, held, ends = (graph.input(name) for name in ("depths", "held", "ends"))
    banned, penalty = graph.input("banned"), graph.input("penalty")
    rows = graph.node("Shape", [raw], start=0, end=1)

    # The text of every row: what was said, and the nodes on the way to it at their places.
    latest = graph.node("Add", [end, graph.constant(np.arange(1 - most, 1))])
    now = graph.node("ScatterElements", [said, latest, recent], "now", axis=0)
    graph.output("said_now", now)
    nothing = ints(NOTHING)
    places = graph.node("Where", [ancestors, graph.node("Add", [end, token_depths]), ints(layout.places - 1)])
    path = graph.node("Where", [ancestors, tokens, nothing])
    every = graph.node("Expand", [now, graph.node("Concat", [rows, ints(layout.places)], axis=0)])
    text = graph.node("ScatterElements", [every, places, path], "text", axis=1)

    def marked(ids: ir.Value, count: int) -> ir.Value:
        """bool [rows, V]: the tokens among `ids` [rows, count], which may name one behind the vocabulary."""
        # TensorRT scatters no more values than it has room for.
        size = graph.node("Concat", [rows, ints(max(vocabulary + 1, count))], axis=0)
        ones = graph.node("Expand", [number(1.0), graph.node("Shape", [ids])])
        zeros = graph.node("Expand", [number(0.0), size])
        scattered = graph.node("ScatterElements", [zeros, ids, ones], axis=1)
        return graph.node("Less", [number(0.0), part(scattered, 0, vocabulary)])

    # What is no token is noted behind the vocabulary.
    behind = ints(vocabulary)
    tokens_so_far = part(text, 0, layout.first_word)
    is_token = graph.node("Less", [nothing, tokens_so_far])
    seen = marked(graph.node("Where", [is_token, tokens_so_far, behind]), layout.first_word)
    negative = graph.node("Less", [raw, number(0.0)])
    scaled = graph.node(
        "Where", [negative, graph.node("Mul", [raw, penalty]), graph.node("Div", [raw, penalty])]
    )
    changed = graph.node("Where", [seen, scaled, raw])

    # What may not come.
    too_early = graph.node("Unsqueeze", [graph.node("Less", [depths, held]), ints(1)])
    forbidden = graph.node("Or", [banned, graph.node("And", [too_early, ends])])
    if repeats:
        needed = graph.input("needed")
        last = graph.node("Unsqueeze", [graph.node("Add", [end, depths]), ints(1)])
        before = graph.node("Sub", [last, graph.constant(np.arange(CONTEXT))])
        own = graph.node("GatherElements", [text, before], "own", axis=1)  # the last tokens of every row
        match = graph.node("Less", [needed, ints(CONTEXT + 1)])
        for back in range(CONTEXT):
            first = layout.lead - 1 - back
            same = graph.node(
                "Equal", [part(text, first, first + layout.compared), part(own, back, back + 1)]
            )
            free = graph.node("Less", [needed, ints(back + 1)])
            match = graph.node("And", [match, graph.node("Or", [same, free])])
        candidates = part(text, layout.lead, layout.places)
        match = graph.node("And", [match, graph.node("Less", [nothing, candidates])], "match")
        matching = marked(graph.node("Where", [match, candidates, behind]), layout.compared)
        forbidden = graph.node("Or", [forbidden, matching])
    graph.output("logits", graph.node("Where", [forbidden, number(float(np.finfo(np.float32).min)), changed]))
    return graph.model()
