"""Typical acceptance of Medusa (Cai et al., arXiv 2401.10774, section 2.3.1): a lossy way to accept, by request only.

A drafted token is accepted where the target finds it likely enough for how open the next token is; nothing is drawn
for it. The text is then no longer distributed as the target's. Only `lossy="typical"` leads here, and every result
that came this way says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import OptionError
from ..common.foreign_errors import raise_if_foreign
from ..common.validation import number
from ..decoder.token_tree import TokenTree
from .verify import Verdict


@dataclass(frozen=True)
class Typical:
    """The criterion: accept x where p(x) > min(epsilon, delta · exp(−H(p))). The defaults are those of Medusa's authors.

    Raises `OptionError` for numbers outside 0..1.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            object.__setattr__(self, name, number(f"typical_{name}", getattr(self, name), 0, 1))

    @classmethod
    def of(cls, name: str, value: Any) -> Typical:
        """Of an option called `name`: a criterion, "typical" for the default one, or "typical:EPSILON,DELTA".

        Raises `OptionError`.
        """
        if isinstance(value, Typical):
            return value
        match = re.fullmatch(r"typical(?::([^,]*),([^,]*))?", value) if isinstance(value, str) else None
        if match is None:
            raise OptionError(f"{name}: {value!r:.80} is not one of typical, typical:EPSILON,DELTA")
        if match[1] is None:
            return cls()
        try:
            return cls(float(match[1]), float(match[2]))
        except ValueError as error:
            raise_if_foreign(error)
            raise OptionError(f"{name}: {value!r:.80} has no two numbers; write typical:0.09,0.3") from None

    def threshold(self, p: np.ndarray) -> float:
        """The probability that a token must exceed, from p [V] after temperature, top-k, top-p and min-p."""
        shares = p[p > 0]
        entropy = -float((shares * np.log(shares)).sum())
        return min(self.epsilon, self.delta * float(np.exp(-entropy)))


@np.errstate(all="ignore")
def verify_typical(
    tree: TokenTree,
    target: Callable[[int, Sequence[int]], np.ndarray],
    choose: Callable[[int, Sequence[int]], int],
    criterion: Typical,
) -> Verdict:
    """The longest path of which every token is accepted; of several the one that the target finds likeliest, then the
    first.

    `target(node, path)` is p [V] after `node`, which the tokens of `path` lead to from the root; it is asked of
    accepted nodes with children only. `choose(node, path)` draws the target's own token after the accepted path: the
    first token of the next cycle, so every cycle gives at least one that is the target's.
    """
    paths: dict[int, list[int]] = {0: []}  # accepted nodes: the nodes that lead to each
    scores: dict[int, float] = {0: 0.0}
    open_to: dict[int, tuple[np.ndarray, float]] = {}
    parents, tokens = tree.parents, tree.tokens
    for node in range(1, len(tree)):
        parent = parents[node]
        if parent not in paths:
            continue
        if parent not in open_to:
            p = target(parent, [tokens[each] for each in paths[parent]])
            open_to[parent] = p, criterion.threshold(p)
        p, threshold = open_to[parent]
        share = float(p[tokens[node]])
        if share > threshold:
            paths[node] = [*paths[parent], node]
            scores[node] = scores[parent] + float(np.log(share))
    last = max(paths, key=lambda node: (len(paths[node]), scores[node], -node))
    path = paths[last]
    token = choose(last, [tokens[each] for each in path])
    return Verdict(path, token, len(path) + (last in open_to))
