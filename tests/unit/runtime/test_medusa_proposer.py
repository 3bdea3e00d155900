"""Medusa in the runtime: trees over ranked proposals, and what a damaged bundle may not do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from vlmexport.runtime.bundle.manifest import DraftInfo
from vlmexport.runtime.common.errors import BundleError
from vlmexport.runtime.drafts.medusa.medusa import Medusa
from vlmexport.runtime.drafts.medusa.static_tree import grow, within
from vlmexport.runtime.session.session import Session
from vlmexport.runtime.speedup.budget import Budget

HITS = [[0.5, 0.2, 0.1], [0.4, 0.3], [0.3, 0.1, 0.05]]


def scores(hits: list[list[float]]) -> list[list[float]]:
    return [[math.log(x) if x else -math.inf for x in head] for head in hits]


def paths(parents: list[int]) -> list[tuple[int, ...]]:
    """The ranks from the root to every node."""
    found: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        rank = parents[:node].count(parent)
        found.append((*(found[parent] if parent >= 0 else ()), rank))
    return found


def every_path(hits: list[list[float]]) -> dict[tuple[int, ...], float]:
    """All paths with their probability."""
    found = {}
    for depth in range(1, len(hits) + 1):
        for ranks in itertools.product(*(range(len(head)) for head in hits[:depth])):
            found[ranks] = math.prod(hits[k][r] for k, r in enumerate(ranks))
    return {path: share for path, share in found.items() if share > 0}


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_holds_the_likeliest_paths_and_grows_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hits = [sorted(rng.random(size).tolist(), reverse=True) for size in rng.integers(1, 5, 3)]
    known = every_path(hits)
    for nodes in (1, 2, 5, 9, 200):
        found = paths(grow(scores(hits), nodes))
        assert len(found) == min(nodes, len(known)) == len(set(found))
        best = sorted(known.values(), reverse=True)[:nodes]
        np.testing.assert_allclose(sorted((known[path] for path in found), reverse=True), best)
        assert found == paths(grow(scores(hits), nodes + 1))[:nodes]
        assert all(path[:-1] in found or len(path) == 1 for path in found)


def test_ranks_without_hits_are_not_in_the_tree() -> None:
    assert paths(grow(scores([[0.5, 0.0], [0.0]]), 9)) == [(0,)]
    assert grow([[math.nan]], 3) == []


@pytest.mark.parametrize(
    "budget", [Budget(5, 1), Budget(9, 2), Budget(4, 3), Budget(30, 3), Budget(2, 2), Budget(1, 3)]
)
def test_a_budget_takes_the_first_nodes_that_fit(budget: Budget) -> None:
    order = grow(scores(HITS), 30)
    parents, depths, ranks = within(order, budget)
    found = paths(parents)
    assert len(parents) <= budget.nodes and max(map(len, found)) <= budget.depth
    assert [len(path) - 1 for path in found] == depths and [path[-1] for path in found] == ranks
    if budget.nodes <= budget.depth:
        assert found == [(0,) * depth for depth in range(1, min(budget.nodes, len(HITS)) + 1)]
    else:
        wanted = [path for path in paths(order) if len(path) <= budget.depth][: budget.nodes]
        assert sorted(found) == sorted(wanted)
        assert found == sorted(found), "the path of first children first, then path by path"


def test_a_session_proposes_trees_of_the_size_asked_for(tiny_bundle: Callable) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        ids = [11, 70, 100, 41, 5]
        plain = session.generate_tokens(ids, max_new_tokens=30, draft="none")
        for options, shape in (
            ({"draft_nodes": 12}, (12, 3)),
            ({"draft_nodes": 7, "draft_length": 2}, (7, 2)),
            ({"draft_length": 2}, (2, 2)),
            ({"draft_length": 9}, (3, 3)),  # three heads look no further
        ):
            found = session.generate_tokens(ids, max_new_tokens=30, draft="medusa", **options)
            assert found.tokens == plain.tokens and shape in found.stats.shapes, (options, found.stats.shapes)


def test_batch_indices_are_released(tiny_bundle: Callable) -> None:
    """More requests than places, some ended before their first cycle."""
    with Session.load(tiny_bundle("llama").path, max_batch=2) as session:
        requests = [
            {"prompt": "red cup " * (1 + n), "max_new_tokens": 1 + n % 4, "draft": "medusa"} for n in range(9)
        ]
        together = session.generate_batch(requests)
        assert [r.tokens for r in together] == [session.generate(**r).tokens for r in requests]
        proposer = session.proposer("medusa")
        assert (
            isinstance(proposer, Medusa) and sorted(proposer._free) == [0, 1] and not proposer._batch_indices
        )


def test_inconsistent_manifest_is_refused_in_one_line(tiny_bundle: Callable) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        assert session.decoder is not None
        draft = session.bundle.manifest.draft("medusa")
        assert draft is not None
        with pytest.raises(BundleError, match="no graph of heads"):
            Medusa(replace(draft, graphs={}), session.decoder)
        for tree, message in (
            ([-1] * 11, "needs 1 heads of 11 ranks, the draft has 3 of 10"),
            ([-1, 0, 1, 2], "needs 4 heads of 1 ranks, the draft has 3 of 10"),
        ):
            with pytest.raises(BundleError, match=message):
                entry = draft.to_dict() | {"tree": tree}
                Medusa(DraftInfo.parse(entry, "draft"), session.decoder)


def test_invalid_draft_vocabulary_is_refused(tiny_bundle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        assert session.decoder is not None
        engine, read = session.decoder.engine, session.decoder.engine.read

        def ask(change: Callable[[np.ndarray], None]) -> None:
            def changed(view):
                found = read(view)
                if view.buffer.name == "medusa.token_ids":
                    change(found)
                return found

            with monkeypatch.context() as patch:
                patch.setattr(engine, "read", changed)
                session.generate_tokens([5, 6, 7], max_new_tokens=9, draft="medusa", draft_nodes=9)

        for change, message in (
            (lambda ids: ids.fill(3), "two children with the same"),
            (lambda ids: ids.__setitem__((0, 0, 0), 10**6), "outside the vocabulary"),
            (lambda ids: ids.__setitem__((0, 0, 0), -1), "outside the vocabulary"),
        ):
            with pytest.raises(BundleError, match=message):
                ask(change)
        session.generate_tokens([5, 6, 7], max_new_tokens=9, draft="medusa", draft_nodes=9)
