"""Combinations of two drafts: which names a bundle has, who proposes, who is told what, and what they are taken to cost."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vlmexport.runtime.bundle.combined_drafts import combinations
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.stored_costs import default_costs, with_combinations, with_drafts_of_requests
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.combined import Expectations, FallbackProposer
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speedup.budget import Budget

from tests.support import handmade_bundle

BUDGET = Budget.chain(2)


class Told(Proposer):
    """Proposes `tokens` of the sequence's own, and keeps what it is told."""

    cut = None

    def __init__(
        self, name: str, knows: dict[str, list[int]], rows: bool = False, resumable: int = 9
    ) -> None:
        self.name, self.knows, self.calls = name, knows, []  # type: list[tuple[Any, ...]]
        self.rows, self._resumable = rows, resumable

    @property
    def needs_hidden(self) -> bool:  # type: ignore[override]
        return self.rows

    @property
    def needs_prompt_hidden(self) -> bool:  # type: ignore[override]
        return self.rows

    @property
    def needs_pictures(self) -> bool:  # type: ignore[override]
        return self.rows

    @property
    def resumable(self) -> int:
        return self._resumable

    def __getattribute__(self, name: str) -> Any:
        if name in ("resume", "begin", "on_pictures", "on_hidden_states", "end"):
            return lambda *given: self.calls.append((name, *given))
        return super().__getattribute__(name)

    def propose(self, sequences: Any, budgets: Any) -> list[TokenTree]:
        self.calls.append(("propose", [sequence.key for sequence in sequences], list(budgets)))
        return [TokenTree.chain([1, *self.knows.get(sequence.key, [])]) for sequence in sequences]

    def advance(self, sequence: Any, tree: TokenTree, verdict: Verdict, rows: Any) -> None:
        self.calls.append(("advance", sequence.key, tree.tokens, rows))


class Of(SimpleNamespace):
    """A sequence, which is one whatever another holds."""

    __hash__ = object.__hash__


def of(key: str) -> Any:
    return Of(key=key, tokens=[1])


def test_second_draft_is_asked_once_per_cycle() -> None:
    first, second = Told("a", {"x": [7, 8]}), Told("b", {"y": [4], "z": [5, 6], "x": [9]})
    combined = FallbackProposer("a+b", first, second)
    given = [Budget.chain(depth) for depth in (2, 1, 3)]
    trees = combined.propose([of("y"), of("x"), of("z")], given)
    assert [tree.tokens for tree in trees] == [[1, 4], [1, 7, 8], [1, 5, 6]]
    assert first.calls == [("propose", ["y", "x", "z"], given)]
    assert second.calls == [("propose", ["y", "z"], [given[0], given[2]])]
    combined.propose([of("x")], [BUDGET])
    assert len(second.calls) == 1, "asked for nothing"


def test_both_drafts_receive_their_inputs() -> None:
    first, second = Told("a", {}, resumable=5), Told("b", {}, rows=True, resumable=3)
    combined = FallbackProposer("a+b", first, second)
    assert (combined.cut, combined.resumable) == (None, 3)
    assert combined.needs_hidden and combined.needs_prompt_hidden and combined.needs_pictures
    sequence, tree, verdict = of("x"), TokenTree.chain([1, 2]), Verdict([1], 3, 1)
    combined.resume(2)
    combined.on_pictures(sequence, [])
    combined.on_hidden_states(sequence, 0, "chunk")  # type: ignore[arg-type]
    combined.begin(sequence)
    combined.advance(sequence, tree, verdict, "rows")  # type: ignore[arg-type]
    combined.end(sequence)
    assert first.calls == [
        ("resume", 2), ("begin", sequence), ("advance", "x", [1, 2], None), ("end", sequence),
    ]  # fmt: skip
    assert second.calls == [
        ("resume", 2), ("on_pictures", sequence, []), ("on_hidden_states", sequence, 0, "chunk"), ("begin", sequence),
        ("advance", "x", [1, 2], "rows"), ("end", sequence),
    ]  # fmt: skip
    plain = FallbackProposer("a+a", Told("a", {}), Told("a", {}))
    assert not (plain.needs_hidden or plain.needs_prompt_hidden or plain.needs_pictures)


def manifest() -> Manifest:
    """One with an early exit, prompt lookup and heads."""
    document = handmade_bundle.manifest(handmade_bundle.byte_level_tokenizer(), "llama")
    drafts = [
        {"name": "heads", "kind": "medusa", "layer": None, "graphs": {}, "trained": True, "fingerprint": None},
        {"name": "prompt-lookup", "kind": "prompt-lookup", "layer": None, "graphs": {}, "trained": False, "fingerprint": None},
    ]  # fmt: skip
    names = [*(graph["file"] for graph in document["graphs"].values()), "weights.bin", "tokenizer.json"]
    files = {name: {"bytes": 1, "sha256": "0" * 64} for name in names}
    kept = [draft for draft in document["drafts"] if draft["kind"] != "prompt-lookup"]
    return Manifest.from_dict(document | {"drafts": [*kept, *drafts], "files": files})


def test_names_of_combined_drafts() -> None:
    found = manifest()
    assert combinations(found.drafts) == {"prompt-lookup+heads": "heads"}
    chosen = found.choose_draft("prompt-lookup+heads")
    assert chosen is not None and (chosen.name, chosen.kind) == ("prompt-lookup+heads", "medusa")
    assert chosen.name not in [draft.name for draft in found.drafts]
    exit_ = next(draft.name for draft in found.drafts if draft.layer is not None)
    for name in (
        "heads+prompt-lookup",
        f"prompt-lookup+{exit_}",
        "prompt-lookup+",
        "prompt-lookup+prompt-lookup",
        "+",
    ):
        with pytest.raises(OptionError, match=r"of combinations it has prompt-lookup\+heads"):
            found.choose_draft(name)
    # A draft of that name goes first: a bundle may come from anyone.
    found.drafts[-2].name = "prompt-lookup+heads"
    assert found.choose_draft("prompt-lookup+heads") is found.drafts[-2]


def test_combined_draft_costs_its_second_draft() -> None:
    found = manifest()
    table = default_costs(found)
    more = with_combinations(table, found.drafts)
    assert set(more.drafts) - set(table.drafts) == {"prompt-lookup+heads"}
    more = with_drafts_of_requests(table, found.drafts)
    behind = ("prompt-lookup", "heads", "prompt-lookup+heads")
    assert set(more.drafts) - set(table.drafts) == {
        "prompt-lookup+heads",
        "memory",
        "grammar",
        "memory+grammar",
        *(f"{first}+{name}" for first in ("memory", "grammar", "memory+grammar") for name in behind),
    }
    assert more.cycle_seconds("memory+grammar+heads", 3) == table.cycle_seconds("heads", 3)
    assert more.cycle_seconds("memory+prompt-lookup+heads", 3) == table.cycle_seconds("heads", 3)
    assert more.cycle_seconds("memory", 3) == table.cycle_seconds("prompt-lookup", 3)
    assert more.cycle_seconds("prompt-lookup+heads", 3) == table.cycle_seconds("heads", 3)
    for name, host in (("prompt-lookup", 0.1), ("heads", 0.3)):
        table = replace(table, drafts={**table.drafts, name: replace(table.drafts[name], host=host)})
    more = with_drafts_of_requests(table, found.drafts)
    assert more.drafts["prompt-lookup"].host == 0.1
    for name in ("memory", "memory+prompt-lookup"):  # nobody measured them
        assert more.cycle_seconds(name, 3) == pytest.approx(table.cycle_seconds("prompt-lookup", 3) + 0.2)
    assert more.cycle_seconds("memory+heads", 3) == table.cycle_seconds("heads", 3)


def test_a_match_is_asked_where_it_brought_as_much_as_the_second_draft() -> None:
    expected = Expectations()
    assert expected.prefers_first(2) and expected.prefers_first(9)
    for _ in range(30):
        expected.note(2, 0)
        expected.note(None, 3)
    assert not expected.prefers_first(2) and expected.prefers_first(9)
    for _ in range(60):
        expected.note(None, 0)
    for _ in range(60):  # it is tried again
        if expected.prefers_first(2):
            break
    assert expected.prefers_first(2)


@pytest.mark.parametrize("matched", [4, 20])
def test_a_long_match_that_was_wrong_is_tried_again_no_sooner(matched: int) -> None:
    expected = Expectations()
    for _ in range(60):
        expected.note(matched, 0)
        expected.note(None, 3)
    waits = next(at for at in range(300) if expected.prefers_first(matched))
    assert 100 < waits < 150


def test_the_second_draft_is_asked_where_the_first_brings_less() -> None:
    class Matching(Told):
        def matched(self, sequence: Any) -> int:
            return 2

    first, second = Matching("a", {"x": [7]}), Told("b", {"x": [4, 5]})
    combined, sequence, budgets = FallbackProposer("a+b", first, second), of("x"), [Budget.chain(2)]
    tokens = []
    for _ in range(40):
        (tree,) = combined.propose([sequence], budgets)
        tokens.append(tree.tokens)
        right = tree.tokens == [1, 4, 5]
        combined.advance(sequence, tree, Verdict([1, 2] if right else [], 0, 2), None)
    assert tokens[0] == [1, 7] and tokens[-1] == [1, 4, 5]
    assert tokens.count([1, 4, 5]) > 20
