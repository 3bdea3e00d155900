"""A memory of earlier answers: what it keeps, what it proposes, and what a session does with it."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vlmexport.runtime import Memory, Session
from vlmexport.runtime.bundle.combined_drafts import behind_requests
from vlmexport.runtime.cli import main
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.drafts.memory.answers import Corpus
from vlmexport.runtime.drafts.memory.memory import MemoryProposer
from vlmexport.runtime.drafts.memory.recall import MOST_PLACES, Recall
from vlmexport.runtime.drafts.prompt_lookup.prompt_lookup import PromptLookup
from vlmexport.runtime.speculative.sequence import Sequence, SequenceLimits
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.stats import Stats

from tests.support.remembering import remembered

ANSWERS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), max_size=5)


def recall(*answers: list[int], **options: Any) -> Recall:
    return Recall(Corpus.of(answers), **options)


def said(found: Recall, *tokens: int) -> Recall:
    for token in tokens:
        found.push(token)
    return found


# --- what is kept ---


def test_the_oldest_answers_go_first() -> None:
    memory = Memory(max_tokens=6)
    for answer in ([1, 2, 3], [4, 5], [1, 2, 3], [6], [7]):
        memory.remember(answer, "a")
    assert repr(memory) == "Memory(3 answers, 5 of 6 tokens)"
    assert Corpus.of([[1, 2, 3], [6], [7]]).tokens.tolist() == memory.corpus().tokens.tolist()
    memory.remember(range(7), "a")
    memory.remember([], "a")
    assert len(memory) == 3
    memory.forget()
    assert len(memory) == 0 and memory.corpus().tokens.tolist() == [-1]


def test_a_request_keeps_what_it_began_with() -> None:
    memory = Memory()
    memory.remember([1, 2], "a")
    corpus = memory.corpus()
    memory.remember([3, 4], "a")
    assert corpus.tokens.tolist() == [-1, 1, 2, -1]
    assert memory.corpus() is memory.corpus() is not corpus


def test_answers_of_another_tokenizer_are_refused() -> None:
    memory = Memory()
    memory.remember([1], "a")
    with pytest.raises(OptionError, match="another tokenizer; give each model a memory of its own"):
        memory.remember([1], "b")
    memory.forget()
    memory.remember([1], "b")


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    memory, path = Memory(max_tokens=50), tmp_path / "front-camera"
    for answer in ([1, 2, 3], [4]):
        memory.remember(answer, "a")
    memory.save(path)
    found = Memory.load(path)
    assert found.corpus().tokens.tolist() == memory.corpus().tokens.tolist()
    assert repr(found) == repr(memory)
    with pytest.raises(OptionError, match="another tokenizer"):
        found.check("b")
    Memory().save(path)
    assert len(Memory.load(path)) == 0


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"format": "another", "version": 1},
        {"format": "vlmexport-memory", "version": 2},
        {"answers": 5},
        {"answers": [5]},
        {"answers": [["a"]]},
        {"answers": [[-1]]},
        {"answers": [[1 << 31]]},
        {"answers": [[True]]},
        {"tokenizer": None},
        {"tokenizer": 7},
        {"max_tokens": 0},
        {"max_tokens": "many"},
    ],
)
def test_a_file_that_is_no_memory_is_one_line(document: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    right = {
        "format": "vlmexport-memory",
        "version": 1,
        "tokenizer": "a",
        "max_tokens": 9,
        "answers": [[1, 2]],
    }
    path.write_text(json.dumps(right | document if document else document))
    with pytest.raises(OptionError) as raised:
        Memory.load(path)
    assert "\n" not in str(raised.value)


def test_threads_remember_together() -> None:
    memory = Memory(max_tokens=300)

    def remember(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            memory.remember([rng.randrange(9) for _ in range(rng.randrange(1, 6))], "a")
            corpus = memory.corpus()
            assert len(corpus.tokens) == len(corpus.weights)

    threads = [threading.Thread(target=remember, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = memory.corpus().tokens.tolist()
    assert sum(token >= 0 for token in held) <= 300 and held.count(-1) == len(memory) + 1


# --- what is proposed ---


def test_an_answer_is_proposed_from_its_first_word_on() -> None:
    found = recall([1, 2, 3, 4, 9], ends=[9])
    assert found.chain(16) == [1, 2, 3, 4, 9]
    assert said(found, 1).chain(2) == [2, 3]
    assert said(found, 2, 3, 4, 9).chain(5) == []


def test_the_latest_of_several_answers_is_believed() -> None:
    found = said(recall([1, 2, 3], [1, 2, 4]), 1)
    assert found.chain(5) == [2, 4]
    assert said(found, 2, 3).chain(5) == []
    assert said(recall([1, 2, 4], [1, 2, 3]), 1).chain(5) == [2, 3]


def test_many_earlier_answers_do_not_outweigh_the_latest() -> None:
    assert said(recall(*([1, 2, 3, tail] for tail in range(10, 20)), [1, 2, 4]), 1, 2).chain(1) == [4]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((1, 7), [3, 4, 5, 6]),  # a word was changed
        ((1, 2, 7, 3, 4), [5, 6]),  # one was added
        ((1, 3, 4), [5, 6]),  # one was left out
        ((8, 2, 3), [4, 5, 6]),  # the first was another
        ((1, 2, 7, 3), [4, 5, 6]),  # a single word matches again, near by
    ],
)
def test_an_edit_is_followed(text: tuple[int, ...], expected: list[int]) -> None:
    assert said(recall([1, 2, 3, 4, 5, 6]), *text).chain(9) == expected


def test_before_another_draft_nothing_is_guessed() -> None:
    found = recall([1, 2, 3, 4, 5, 6], shortest=2)
    assert said(found, 1).chain(2) == [2, 3]
    assert said(found, 7).chain(2) == []
    assert said(found, 3).chain(2) == [] and said(found, 4).chain(2) == [5, 6]


def test_a_tree_holds_what_the_answers_disagree_about() -> None:
    found = said(recall([1, 2, 3, 4], [1, 5, 6, 7], [1, 5, 6, 8]), 1)
    tokens, parents = found.tree(Budget(6, 3))
    paths = {tuple(path(tokens, parents, node)) for node in range(len(tokens))}
    assert {(5, 6, 8), (5, 6, 7), (2,)} <= paths
    assert found.tree(Budget(3, 3)) == ([5, 6, 8], [-1, 0, 1])


def path(tokens: list[int], parents: list[int], node: int) -> list[int]:
    return [*(path(tokens, parents, parents[node]) if parents[node] >= 0 else []), tokens[node]]


@given(ANSWERS, st.lists(st.integers(0, 5), max_size=15), st.integers(1, 8), st.integers(1, 14))
def test_proposals_keep_within_budget_and_vocabulary(
    answers: list[list[int]], text: list[int], depth: int, nodes: int
) -> None:
    found = said(recall(*answers, barred=[2], ends=[3], vocab_size=5), *text)
    tokens, parents = found.tree(Budget(nodes, min(depth, nodes)))
    assert len(tokens) == len(parents) <= nodes
    assert not {2, 5, -1} & set(tokens)
    for node, parent in enumerate(parents):
        assert -1 <= parent < node and len(path(tokens, parents, node)) <= depth
        assert parent < 0 or tokens[parent] != 3, "something follows an end"
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens), "two children are the same"


@given(ANSWERS, st.lists(st.integers(0, 3), max_size=12))
def test_the_longest_match_is_found(answers: list[list[int]], text: list[int]) -> None:
    """Against the definition: the longest end of the text, with its beginning, that stands in an answer with its own."""
    found, whole = said(recall(*answers), *text), [-1, *text]
    texts = [[-1, *answer] for answer in answers]
    longest = max(
        (n for n in range(1, len(whole) + 1) for held in texts if contains(held, whole[-n:])), default=0
    )
    assert found.longest == (longest if answers else int(not text))
    if longest > 1:
        held, end = Corpus.of(answers).tokens.tolist(), whole[-longest:]
        ends = [at for at in range(longest - 1, len(held)) if held[at + 1 - longest : at + 1] == end]
        assert found.places() == ends


def test_of_many_places_the_latest_are_followed() -> None:
    answers = [[1, 2, 3, 9], *([1, 2, 3, 4 + at % 2] for at in range(2 * MOST_PLACES))]
    found = said(recall(*answers), 1, 2, 3)
    assert found.longest == 4 and len(found.places()) == MOST_PLACES and found.places()[0] == 3
    assert found.chain(1) == [5]
    assert said(found, 9).longest == 5, "what only an older answer has is found too"


@given(ANSWERS, st.lists(st.integers(0, 5), min_size=1, max_size=25), st.data())
def test_proposals_are_the_same_however_seldom_one_is_asked(
    answers: list[list[int]], text: list[int], data: st.DataObject
) -> None:
    memory, text_info = remembered(answers), SimpleNamespace(vocab_size=6)
    decoder: Any = SimpleNamespace(manifest=SimpleNamespace(text=text_info))
    draft: Any = SimpleNamespace(name="draft")
    for shortest in (1, 2):
        for often, seldom in (
            (MemoryProposer(draft, decoder, shortest), MemoryProposer(draft, decoder, shortest)),
            (PromptLookup(draft, decoder), PromptLookup(draft, decoder)),
        ):
            sequence = Sequence(text[:3], SequenceLimits(99, {3}), Stats(), memory=memory)
            often.begin(sequence)
            seldom.begin(sequence)
            for token in text:
                sequence.tokens.append(token)
                budget = data.draw(st.sampled_from([Budget.chain(1), Budget.chain(5), Budget(6, 3)]))
                trees = [often.propose_one(sequence, budget)]
                if data.draw(st.booleans()):
                    trees.append(seldom.propose_one(sequence, budget))
                assert len({(*tree.tokens, *tree.parents) for tree in trees}) == 1


def contains(held: list[int], part: list[int]) -> bool:
    return any(held[at : at + len(part)] == part for at in range(len(held) - len(part) + 1))


# --- in a session ---


def test_an_answer_that_is_given_again_takes_few_passes(tiny_bundle: Callable[[str], Any]) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        ids, plain = [5, 6, 7], {"max_new_tokens": 20, "ignore_eos": True, "draft_length": 8}
        first = session.generate_tokens(ids, draft="memory", memory="front", **plain)
        again = session.generate_tokens(ids, draft="memory", memory="front", **plain)
        other = session.generate_tokens(ids, draft="memory", memory="rear", **plain)
        assert first.tokens == again.tokens == other.tokens
        assert again.stats.cycles <= 4 < other.stats.cycles
        assert again.stats.alpha == 1 and again.stats.draft == "memory"
        session.forget("front")
        assert len(session.memory("front")) == 0 and len(session.memory("rear")) == 1
        session.forget()
        assert len(session.memory("rear")) == 0


def test_a_memory_comes_before_the_bundles_draft_where_it_can(tiny_bundle: Callable[[str], Any]) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        names = [draft.name for draft in session.bundle.manifest.drafts]
        options: dict[str, Any] = {"max_new_tokens": 4, "memory": Memory()}
        used = {
            asked: session.generate_tokens([5, 6], draft=asked, **options).stats.draft
            for asked in (None, "medusa", "prompt-lookup", "prompt-lookup+medusa", "none", "memory")
        }
        assert used["medusa"] == "memory+medusa" and used["prompt-lookup"] == "memory+prompt-lookup"
        assert used["prompt-lookup+medusa"] == "memory+prompt-lookup+medusa"
        assert used["none"] is None and used["memory"] == "memory" and used[None].startswith("memory")
        own = next(name for name in names if name.startswith("early-exit"))
        with pytest.raises(OptionError, match=rf"memory: {own} drafts on the target's own layers"):
            session.generate_tokens([5, 6], draft=own, **options)
        with pytest.raises(OptionError, match="proposes from the request's `memory`"):
            session.generate_tokens([5, 6], draft="memory")
        with pytest.raises(OptionError, match="the bundle has no 'memory\\+nothing'"):
            session.generate_tokens([5, 6], draft="memory+nothing", **options)
        for wrong in ("", "a" * 201, 7):
            with pytest.raises(OptionError, match="memory: "):
                session.generate_tokens([5, 6], memory=wrong)
        behind = behind_requests(session.bundle.manifest.drafts)
        assert behind["memory"] is None and behind["memory+prompt-lookup+medusa"] == "medusa"


def test_a_plain_request_is_remembered_too(tiny_bundle: Callable[[str], Any]) -> None:
    memory = Memory()
    with Session.load(tiny_bundle("llama").path) as session:
        found = session.generate_tokens([5, 6], max_new_tokens=5, draft="none", memory=memory)
        assert memory.corpus().tokens.tolist() == [-1, *found.tokens, -1]
        stream = session.stream(prompt="a", max_new_tokens=20, memory=memory, ignore_eos=True)
        next(stream)
        stream.close()
        assert len(memory) == 2, "what was said before the end"


def test_requests_of_a_batch_have_memories_of_their_own(tiny_bundle: Callable[[str], Any]) -> None:
    with Session.load(tiny_bundle("llama").path, max_batch=3) as session:
        requests = [
            {"prompt": text, "max_new_tokens": 12, "ignore_eos": True, "memory": name}
            for text, name in (("red", "a"), ("blue", "b"), ("red", "a"))
        ]
        alone = [
            session.generate(**{**each, "memory": Memory(), "draft": "none"}).tokens for each in requests
        ]
        for _ in range(3):
            assert [result.tokens for result in session.generate_batch(requests)] == alone
        assert len(session.memory("a")) == len(session.memory("b")) == 1


def test_a_memory_of_another_model_is_refused_before_any_work(tiny_bundle: Callable[[str], Any]) -> None:
    memory = Memory()
    memory.remember([1, 2], "of another")
    with (
        Session.load(tiny_bundle("llama").path) as session,
        pytest.raises(OptionError, match="another tokenizer"),
    ):
        session.generate_tokens([5], memory=memory)


# --- on the command line, and in a conversation ---


def test_run_keeps_answers_in_a_file(
    tiny_bundle: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tiny_bundle("llama").path, tmp_path / "front.json"
    line = ["run", str(path), "--prompt", "red", "--max-new-tokens", "12", "--json", "--draft", "memory"]
    reports = []
    for _ in range(2):
        assert main([*line, "--memory", str(file)]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["tokens"] == reports[1]["tokens"] and len(Memory.load(file)) == 1
    assert [row["stats"]["draft"] for row in reports] == ["memory"] * 2
    file.write_text("{}")
    assert main([*line, "--memory", str(file)]) == 2
    assert "is not a memory of vlmexport" in capsys.readouterr().err
    assert main([*line, "--memory", str(tmp_path / "none" / "file")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(line) == 2
    assert "proposes from the request's `memory`" in capsys.readouterr().err


def test_a_conversation_remembers_its_answers(tiny_bundle: Callable[[str], Any]) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        names = [draft.name for draft in session.bundle.manifest.drafts]
        own = next(name for name in names if name.startswith("early-exit"))
        chat = session.chat()

        def used(**options: Any) -> tuple[str | None, int]:
            chat.messages.clear()  # the tiny model holds few turns
            chat.memory.forget()
            said = chat.say("red", max_new_tokens=8, ignore_eos=True, **options)
            return said.stats.draft, len(chat.memory)

        assert used(draft="medusa") == ("memory+medusa", 1)
        assert used(draft="medusa", memory=None) == ("medusa", 0)
        assert (
            used(draft="medusa", memory="mine") == ("memory+medusa", 0) and len(session.memory("mine")) == 1
        )
        assert used(draft="none") == (None, 0)
        assert used(draft=own) == (own, 0), "nothing can be asked before it"
        assert used(draft="medusa", lossy="typical", temperature=0.7) == ("medusa", 0)
        assert len(session.chat().memory) == 0, "each conversation has its own"


def test_a_conversation_of_a_bundle_that_does_not_draft_does_not_begin_to(
    tiny_bundle: Callable[[str], Any],
) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        for draft, speculative in (("medusa", True), ("medusa", False), (None, True)):
            policy = replace(session.bundle.manifest.policy, draft=draft, speculative=speculative)
            session.bundle.manifest.policy = policy
            found = session.chat().say("red", max_new_tokens=3, ignore_eos=True)
            assert found.stats.draft == ("memory+medusa" if draft and speculative else None)
