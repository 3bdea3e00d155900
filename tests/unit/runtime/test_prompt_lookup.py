"""The n-gram index against a search of the whole text, and prompt lookup as a proposer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.prompt_lookup.ngram_index import NgramIndex
from vlmexport.runtime.drafts.prompt_lookup.prompt_lookup import PromptLookup
from vlmexport.runtime.sampling.verify import verify_draws
from vlmexport.runtime.speedup.budget import NOTHING, Budget

BARRED, END, VOCAB = 4, 3, 6
TEXTS = st.lists(st.integers(-1, VOCAB), max_size=40)  # −1, 4 and 6 are never proposed


def proposable(token: int) -> bool:
    return token != BARRED and 0 <= token < VOCAB


def index_of(text: list[int], **options: Any) -> NgramIndex:
    index = NgramIndex(barred=(BARRED,), ends=(END,), vocab_size=VOCAB, **options)
    index.extend(text)
    return index


def searched(text: list[int], longest: int, shortest: int, keep: int) -> list[int]:
    """The places by their definition: compare every earlier window with the suffix."""
    places: list[int] = []
    for length in range(longest, shortest - 1, -1):
        suffix = text[len(text) - length :]
        if length > len(text) or not all(map(proposable, suffix)):
            continue
        found = [
            at
            for at in range(len(text) - 1, length - 1, -1)
            if text[at - length : at] == suffix and proposable(text[at])
        ]
        places += [at for at in found[:keep] if at not in places]
    return places


def followed(text: list[int], place: int, depth: int) -> list[int]:
    """`depth` tokens from `place`, appended to the text one by one, as a reader of the grown text sees them."""
    grown, taken = list(text), []
    for at in range(place, place + depth):
        if not proposable(grown[at]):
            break
        taken.append(grown[at])
        if grown[at] == END:
            break
        grown.append(grown[at])
    return taken


@given(TEXTS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_ngram_index_equals_full_search(text: list[int], longest: int, shortest: int, keep: int):
    shortest = min(longest, shortest)
    index = index_of(text, longest=longest, shortest=shortest, keep=keep)
    assert list(index.places()) == searched(text, longest, shortest, keep)


@given(TEXTS, st.integers(1, 9))
def test_chain_continues_the_latest_longest_match(text: list[int], depth: int):
    places = searched(text, 3, 1, 8)
    assert index_of(text).chain(depth) == (followed(text, places[0], depth) if places else [])


@given(TEXTS, st.integers(1, 12), st.integers(1, 5))
def test_a_tree_holds_the_continuations_in_order(text: list[int], nodes: int, depth: int):
    budget = Budget(max(nodes, depth), depth)
    tokens, parents = index_of(text).tree(budget)
    tree = TokenTree([9, *tokens], [-1, *(parent + 1 for parent in parents)])  # refuses equal children
    assert tree.proposed <= budget.nodes and max(tree.depths) <= budget.depth
    assert all(map(proposable, tokens))
    paths = [followed(text, place, depth) for place in searched(text, 3, 1, 8)]
    wanted: list[tuple[int, ...]] = []
    for path in paths if budget.nodes > budget.depth else paths[:1]:
        wanted += [prefix for n in range(1, len(path) + 1) if (prefix := tuple(path[:n])) not in wanted]
    found = []
    for node in range(1, len(tree)):
        path, at = [], node
        while at:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        found.append(tuple(path[::-1]))
    assert found == wanted[: budget.nodes]


@given(TEXTS)
def test_pushing_token_by_token_equals_indexing_at_once(text: list[int]):
    index = NgramIndex(barred=(BARRED,), ends=(END,), vocab_size=VOCAB)
    for at, token in enumerate(text):
        assert list(index.places()) == searched(text[:at], 3, 1, 8)
        index.push(token)
    assert len(index) == len(text)


def test_memory_and_places_are_bounded():
    index = NgramIndex(longest=3, shortest=1, keep=8)
    index.extend([1] * 5000)
    assert len(index._places) == 3
    assert max(len(places) for places in index._places.values()) == 8
    assert index.chain(5) == [1] * 5, "a period goes on past the end of the text"


def test_longer_matches_come_before_later_ones():
    # (7 8) → 1 long ago, 8 → 2 more lately
    index = NgramIndex()
    index.extend([7, 8, 1, 5, 8, 2, 7, 8])
    assert index.chain(2) == [1, 5]
    assert index.tree(Budget(4, 2)) == ([1, 5, 2, 7], [-1, 0, -1, 2])


@pytest.mark.parametrize("lengths", [(0, 0), (2, 3), (3, 0)])
def test_impossible_lengths_are_refused(lengths: tuple[int, int]):
    with pytest.raises(ValueError, match="no index"):
        NgramIndex(*lengths)


def test_budgets():
    assert Budget.chain(4) == Budget(4, 4) and Budget.chain(0) == NOTHING and NOTHING.empty
    assert Budget(8, 4).within(6, 9) == Budget(6, 4)
    assert Budget(8, 4).within(16, 2) == Budget(8, 2)
    assert Budget.chain(5).within(16, 2) == Budget.chain(2)
    assert Budget(8, 4).within(3, 9) == Budget.chain(3)
    assert Budget(8, 4).within(3, 0) == Budget(8, 4).within(0, 3) == Budget(8, 4).within(-1, 3) == NOTHING
    for nodes, depth in ((-1, -1), (3, 0), (0, 3)):
        with pytest.raises(ValueError, match="no tree"):
            Budget(nodes, depth)


# --- the proposer ---


@dataclass
class Limits:
    eos_token_ids: tuple[int, ...] = (END,)


@dataclass(eq=False)
class Sequence:
    prompt_ids: list[int]
    tokens: list[int] = field(default_factory=list)
    barred: tuple[int, ...] = (BARRED,)
    limits: Limits = field(default_factory=Limits)


def lookup(vocab_size: int = 100) -> PromptLookup:
    """The proposer as a session of this vocabulary makes it."""
    text = SimpleNamespace(vocab_size=vocab_size)
    draft, decoder = (
        SimpleNamespace(name="prompt-lookup"),
        SimpleNamespace(manifest=SimpleNamespace(text=text)),
    )
    return PromptLookup(draft, decoder)  # type: ignore[arg-type]


def decode(proposer: PromptLookup, sequence: Any, answer: list[int], budget: Budget) -> int:
    """Greedy cycles until the answer is out; returns how many. `answer[i]` is the target's i-th token."""
    proposer.begin(sequence)
    sequence.tokens.append(answer[0])
    cycles = 0
    while len(sequence.tokens) < len(answer):
        tree = proposer.propose_one(sequence, budget)
        assert tree.tokens[0] == sequence.tokens[-1] and tree.proposed <= budget.nodes
        rest = [*answer[len(sequence.tokens) :], *[-9] * (budget.depth + 1)]
        verdict = verify_draws(tree, lambda node, depth, rest=rest: rest[depth])
        emitted = [*(tree.tokens[node] for node in verdict.path), verdict.token]
        sequence.tokens += emitted
        proposer.advance(sequence, tree, verdict, None)
        cycles += 1
    proposer.end(sequence)
    return cycles


def test_copied_text_takes_few_cycles_and_two_sequences_do_not_mix():
    proposer, prompt = lookup(), list(range(10, 60))
    copying, other = Sequence(prompt), Sequence([70, 71, 72])
    proposer.begin(other)
    other.tokens += [70]
    assert decode(proposer, copying, prompt[5:45], Budget.chain(4)) == 8  # 39 tokens, five a cycle
    assert proposer.propose_one(other, Budget.chain(4)).tokens == [70, 71, 72, 70, 71]
    assert proposer._open.keys() == {other}


def test_branch_saves_a_cycle():
    prompt = [10, 11, 12, 13, 14, 10, 11, 22, 23, 24, 30]
    answer = [10, 11, 12, 13, 14]
    cycles = [decode(lookup(), Sequence(prompt), answer, budget) for budget in (Budget(3, 3), Budget(6, 3))]
    assert cycles == [2, 1]


def test_image_places_and_end_tokens():
    proposer = lookup(VOCAB)
    sequence = Sequence([1, BARRED, BARRED, 2, 5, END, 0, 1], tokens=[5])
    proposer.begin(sequence)  # type: ignore[arg-type]
    propose = lambda: proposer.propose_one(sequence, Budget.chain(4)).tokens  # type: ignore[arg-type]  # noqa: E731
    assert propose() == [5, END], "nothing follows an end token"
    sequence.tokens.append(1)
    assert propose() == [1, 5, 1, 5, 1], "the image between the first 1 and the 2 is passed over"
    sequence.tokens += [2]
    assert propose() == [2, 5, END]
    assert proposer.propose_one(sequence, NOTHING).tokens == [2]  # type: ignore[arg-type]
