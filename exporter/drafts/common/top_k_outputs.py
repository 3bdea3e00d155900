"""The best tokens of a draft's logits, ranked in its graph, so that a few hundred bytes reach the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...graphs.composer import Composer


def ranked(graph: Composer, logits: ir.Value, ranks: int, d2t: ir.Value | None) -> dict[str, ir.Value]:
    """`token_ids` and `log_probabilities` [.., ranks] of logits [.., words], best first; `d2t` int64 [words] gives the
    target's ids of a vocabulary of the draft's own."""
    count = graph.constant(np.array([ranks], np.int64))
    values, ids = graph.nodes("TopK", [logits, count], 2, "ranked", axis=-1, largest=1, sorted=1)
    last = graph.constant(np.array([-1], np.int64))
    total = graph.node("ReduceLogSumExp", [logits, last], "total", keepdims=1)
    if d2t is not None:
        ids = graph.node("Gather", [d2t, ids], "d2t", axis=0)
    return {"token_ids": ids, "log_probabilities": graph.node("Sub", [values, total], "log_softmax")}


def compare_ranked(
    outputs: Mapping[str, np.ndarray],
    expected: np.ndarray,
    error: np.ndarray,
    d2t: np.ndarray | None,
    words: int,
) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """What `Draft.parity` gives for the outputs of `ranked`.

    `expected` are the reference's log-probabilities [.., words of the draft], `error` is how far they are from float64;
    `words` counts the target's. Near-ties may be ranked otherwise: the best values must agree, and each id must have
    its value.
    """
    values, ids = outputs["log_probabilities"], outputs["token_ids"]
    best, exact = (
        -np.sort(-v, -1)[..., : values.shape[-1]] for v in (expected, expected - error.astype(float))
    )
    yield "best", values, best, best - exact
    if d2t is not None:
        places = np.full(words, -1)
        places[d2t] = np.arange(len(d2t))
        ids = places[ids]
    value, differs = (np.take_along_axis(each, ids, -1) for each in (expected, error))
    yield "ids", values, value, differs
