"""A grammar over any vocabulary, and what may follow in it by a rule of its own: `spells` knows nothing of llguidance.

Tokens are all short words of three letters, so most texts have many spellings. Where the grammar leaves no choice of
letters, llguidance allows one spelling, elsewhere all of them."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from vlmexport.runtime.drafts.grammar.forced import ForcedTokens
from vlmexport.runtime.grammars.matcher import GrammarMatcher
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative import sequence as sequences

if TYPE_CHECKING:
    from tests.support.oracle import Oracle, Request

ALPHABET = "abc"
END = 1
"""The end token."""
CHOICES = (
    "abcabcabcacbacbabcabcbbbcabaccacbacbaba",
    "abcabcabcacbacbcacacacabbcabbacbacbacbb",
    "bacbacbacbbaacbacbacbaacbacbacbbabc",
    "bacbacbacbcaacbbbabababaabcabc",
    "ccacbacbacbbacbaa",
    "ccacbacbacbb",
)


@functools.cache
def words(vocabulary: int) -> tuple[str, ...]:
    """The text of every id: "" of the first ones, which are special."""
    some = itertools.chain.from_iterable(
        map("".join, itertools.product(ALPHABET, repeat=size)) for size in itertools.count(1)
    )
    return ("", "", "", *itertools.islice(some, vocabulary - 3))


def spells(tokens: tuple[int, ...], vocabulary: int) -> np.ndarray:
    """bool [V]: which tokens go on with one of `CHOICES`, or end it."""
    known = words(vocabulary)
    text = "".join(known[token] for token in tokens)
    found = np.array([bool(w) and any(c.startswith(text + w) for c in CHOICES) for w in known])
    found[END] = text in CHOICES
    return found


@functools.lru_cache(maxsize=4096)
def allowed(tokens: tuple[int, ...], vocabulary: int) -> np.ndarray:
    """bool [V]: which tokens may follow, by a matcher that was never anywhere else."""
    fresh = _compiled(vocabulary)[0].deep_copy()
    assert fresh.consume_tokens(list(tokens))
    mask = np.unpackbits(np.frombuffer(fresh.compute_bitmask(), np.uint8), bitorder="little")
    found = mask[:vocabulary].astype(bool)
    may = spells(tokens, vocabulary)
    assert found.any() and not (found & ~may).any()
    letters = {words(vocabulary)[token][:1] for token in np.flatnonzero(may)}
    assert len(letters) == 1 or (found == may).all(), "a choice, and not all spellings of it"
    return found


@functools.cache
def _compiled(vocabulary: int) -> tuple[Any, Any]:
    import llguidance

    known = words(vocabulary)

    class Words:
        eos_token_id, bos_token_id, special_token_ids = END, None, (0, 1, 2)
        tokens = tuple(word.encode() for word in known)

        def __call__(self, text: bytes) -> list[int]:
            ids = {word: i for i, word in enumerate(self.tokens) if word}
            at, found = 0, []
            while size := next((n for n in range(8, 0, -1) if text[at : at + n] in ids and text[at:]), 0):
                found.append(ids[text[at : at + size]])
                at += len(text[at : at + size])
            return found

    backend = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Words()), n_vocab=vocabulary, eos_token=[END]
    )
    source = "start: " + " | ".join(map(json.dumps, CHOICES))
    return llguidance.LLMatcher(backend, source, log_level=0), SimpleNamespace(backend=backend)


def of_letters(vocabulary: int, pattern: str) -> Callable[[], GrammarMatcher]:
    """States at the beginning, over a vocabulary whose token 0 ends and whose others are a, b, …: what matches a pattern."""
    import llguidance

    class Letters:
        eos_token_id, bos_token_id, special_token_ids = 0, None, (0,)
        tokens = (b"<end>", *(bytes([96 + token]) for token in range(1, vocabulary)))

        def __call__(self, text: bytes) -> list[int]:
            return [self.tokens.index(bytes([letter])) for letter in text if bytes([letter]) in self.tokens]

    backend = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(Letters()), n_vocab=vocabulary, eos_token=[0]
    )
    compiled = llguidance.LLMatcher(backend, llguidance.LLMatcher.grammar_from_regex(pattern), log_level=0)
    assert not compiled.is_error()
    tokens: Any = SimpleNamespace(backend=backend)
    return lambda: GrammarMatcher(lambda again: compiled.deep_copy(), tokens)


def matcher(vocabulary: int) -> GrammarMatcher:
    """At the beginning of an answer that is one of `CHOICES`."""
    compiled, tokens = _compiled(vocabulary)
    return GrammarMatcher(lambda again: compiled.deep_copy(), tokens)


@functools.lru_cache(maxsize=256)
def greedy(oracle: Oracle, request: Request, limit: int) -> tuple[int, ...]:
    """The likeliest allowed tokens by transformers' logits of the whole prefix, each time anew."""
    tokens: list[int] = []
    while len(tokens) < limit and tokens[-1:] != [END]:
        logits = oracle.logits(request, tuple(tokens))[-1]
        tokens.append(int(np.where(allowed(tuple(tokens), len(logits)), logits, -np.inf).argmax()))
    return tuple(tokens)


# --- mutants ---


def masked_one_token_late(patch: pytest.MonkeyPatch) -> None:
    """The mask of a token is that of the one before it."""
    right = GrammarMatcher.barred
    patch.setattr(GrammarMatcher, "barred", lambda self, path, size: right(self, path[:-1], size))


def forced_tokens_unverified(patch: pytest.MonkeyPatch) -> None:
    """What the grammar forces is emitted in the spelling that was proposed."""
    judge = sequences.Sequence.judge

    def wrong(self: Any, tree: Any, logits: Any, first: int) -> Verdict:
        right = judge(self, tree, logits, first)
        if not isinstance(self.proposer, ForcedTokens):
            return right
        token = self.choose(logits, first + tree.proposed, tree.tokens[1:])
        return Verdict(list(range(1, len(tree))), token, len(tree) - 1)

    patch.setattr(sequences.Sequence, "judge", wrong)


def masks_of_the_cycle_before(patch: pytest.MonkeyPatch) -> None:
    """A mask is kept from cycle to cycle."""
    extend = GrammarMatcher.extend

    def wrong(self: Any, tokens: Any) -> None:
        kept = dict(self._barred)
        extend(self, tokens)
        self._barred.update(kept)

    patch.setattr(GrammarMatcher, "extend", wrong)
