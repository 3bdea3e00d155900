"""What an EAGLE layer proposes, written a second time: path by path, each with a past of its own."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.eagle.dynamic_tree import expansions
from vlmexport.runtime.speedup.budget import Budget

from tests.support.mrope_angles import angles_of
from tests.support.oracle import Request
from tests.support.rig import Rig

Path = tuple[int, ...]


class Growing:
    """A layer that grows trees behind a pending token."""

    known: dict[Path, tuple[Any, Any]]
    """Path behind the pending token → feature after it, keys and values."""

    def __init__(self, network: Any, embed: Any, table: Any) -> None:
        self.network, self.embed, self.table = network, embed, table

    def step(self, path: Path) -> tuple[Any, Any]:
        """Feature [1, 1, E], keys and values behind `path`, whose parent is known."""
        feature, past = self.known[path[:-1]]
        count = past[0].shape[2]
        mask = torch.ones(1, 1, 1, count + 1, dtype=torch.bool)
        embedded = self.embed(torch.tensor([path[-1:]]))
        return self.network(embedded, feature, self.place(count), mask, past)

    def place(self, slot: int) -> torch.Tensor:
        """The position behind `slot` others, as the layer takes it."""
        return torch.tensor([[slot]])

    @torch.inference_mode()
    def after(self, path: Path, ranks: int) -> list[tuple[int, float]]:
        """The best ids with their log-probabilities behind the pending token and `path`, best first."""
        if path not in self.known:
            self.known[path] = self.step(path)
        feature, _ = self.known[path]
        values, found = self.network.logits(feature[0, 0], self.table).log_softmax(-1).topk(ranks)
        d2t = getattr(self.network, "d2t", None)
        return list(zip((found if d2t is None else d2t[found]).tolist(), values.tolist(), strict=True))

    def paths(self, budget: Budget, ranks: int) -> set[Path]:
        """The paths of the tree that it proposes: the likeliest of those that its growth reaches."""
        each = 1 if budget.nodes <= budget.depth else ranks
        scores: dict[Path, float] = {(): 0.0}
        frontier: list[Path] = [()]
        for width in [*expansions(budget), 0]:
            level = {
                (*path, token): scores[path] + score
                for path in frontier
                for token, score in self.after(path, each)
            }
            scores |= level
            frontier = sorted(level, key=lambda path: -level[path])[:width]
        del scores[()]
        return set(sorted(scores, key=lambda path: -scores[path])[: budget.nodes])


class EagleOracle(Growing):
    """The layer `network` of a checkpoint behind `tokens`, the last of which is pending."""

    @torch.inference_mode()
    def __init__(self, rig: Rig, network: Any, request: Request, tokens: Items[int]) -> None:
        _, table = rig.oracle.final_rows(request, tokens[:-1])
        super().__init__(network, rig.oracle.text.get_input_embeddings(), table)
        features = self.features(rig, request, tokens[:-1])
        ids = [*rig.first_ids(request), *tokens]
        assert len(features) == len(ids) - 1
        mask = torch.ones(len(features), len(features), dtype=torch.bool).tril()[None, None]
        places = torch.arange(len(features))[None]
        if network.config.axes > 1:  # transformers' own
            places = rig.oracle.positions(request, tokens[:-1])
            network.angles = lambda places: angles_of(network.config, places)
        self.last = places[..., -1:]
        rows, past = network(self.embed(torch.tensor([ids[1:]])), features[None], places, mask)
        self.known = {(): (rows[:, -1:], past)}

    def place(self, slot: int) -> torch.Tensor:
        known = self.known[()][1][0].shape[2]
        return self.last + (slot - known + 1)

    def features(self, rig: Rig, request: Request, tokens: Items[int]) -> torch.Tensor:
        """What the layer goes on from at every position up to the last of `tokens`, [n, E]."""
        return rig.oracle.final_rows(request, tokens)[0]


class WideOracle(EagleOracle):
    """EAGLE-3's layer: rows after three layers, joined, in place of features."""

    def features(self, rig: Rig, request: Request, tokens: Items[int]) -> torch.Tensor:
        rows = [rig.oracle.rows_after(request, tokens, tap) for tap in self.network.config.taps]
        return self.network.fused(*rows)


def paths_of(tree: TokenTree) -> set[Path]:
    """Token path of every drafted node."""
    found: list[Path] = [()]
    for node in range(1, len(tree)):
        found.append((*found[tree.parents[node]], tree.tokens[node]))
    return set(found[1:])
