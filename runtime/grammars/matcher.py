"""Where an answer stands in its grammar: which tokens may follow, and what must."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.errors import GrammarError, OptionError
from ..common.optional_deps import need_extra
from ..decoder.token_tree import TokenTree

if TYPE_CHECKING:
    from ..bundle.folder import Bundle
    from ..speedup.budget import Budget
    from .grammar import Grammar
    from .tokens import GrammarTokens

KEPT = 16
"""Compiled grammars of a tokenizer."""

MOST_RECOVERIES = 8
"""Of a request: each compiles its grammar again, which takes a second where that is as large as llguidance can take."""


class GrammarMatcher:
    """The state of one request. `path` below: tokens behind those that were emitted, as in a tree of drafts.

    It walks to a path and back, and keeps the masks of a cycle: drafting and verification ask for the same ones.
    """

    def __init__(
        self,
        begin: Callable[[bool], Any],
        tokens: GrammarTokens,
        parse: Callable[[str], Any] = str,
    ) -> None:
        """`begin(again)`: an `LLMatcher` at the beginning, which is this request's own; `again`: compiled anew. `parse` as
        `Grammar` has it."""
        self.parse = parse
        self._begin, self._matcher, self._tokens = begin, begin(False), tokens.backend
        self._emitted: list[int] = []
        self._recoveries = 0
        self._ends = frozenset(tokens.backend.eos_tokens)
        self._path: list[int] = []
        self._barred: dict[tuple[int, ...], np.ndarray] = {}
        self._over = self._lost = False

    def barred(self, path: Sequence[int], size: int) -> np.ndarray | None:
        """bool [size]: the tokens that may not follow. None where anything may, behind an end token, and behind a path that
        is no beginning of an answer.

        Raises `GrammarError` where nothing may follow.
        """
        key = tuple(path)
        barred = self._barred.get(key)
        if barred is None:
            if self._over or (key and key[-1] in self._ends):
                return None
            bits = self._mask(key)
            if bits is None:
                return None
            barred = np.unpackbits(~bits, count=size, bitorder="little").view(np.bool_)
            self._barred[key] = barred
        return barred

    def extend(self, tokens: Sequence[int]) -> None:
        """These were emitted."""
        for token in tokens:
            if self._over:
                return
            if token in self._ends:
                self._over = True
            elif self._path[:1] == [token]:
                del self._path[0]  # the matcher stands on or behind it
            elif not self._lost:
                self._lost = not self._go((token,))  # where llguidance gives up; the next mask says so
                self._path.clear()
            self._emitted.append(token)
        self._barred.clear()

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that spell what must follow. Others may spell the same: this is a proposal."""
        if most < 1 or self._over or not self._go(path) or (path and path[-1] in self._ends):
            return []
        text = self._matcher.compute_ff_bytes()
        if self._matcher.is_error():
            self._recover()
            return []
        tokens = self._tokens.tokenize_bytes(text) if text else []
        if len(tokens) < most and self._go([*path, *tokens]) and self._matcher.is_stopped():
            tokens.append(self._tokens.eos_token)
        return tokens[:most]

    def fit(self, tree: TokenTree, budget: Budget) -> TokenTree:
        """The tree without what the grammar does not allow; a chain then goes on with what must follow. Tokens that were drawn
        from a distribution stay: to leave one out would change the law of the text."""
        if tree.draft_probs is not None or self._over:
            return tree
        tokens = tree.tokens
        if tree.is_chain:
            kept = self._allowed(tokens[1:])
            chain = [*tokens[: kept + 1]]
            chain += self.forced(chain[1:], budget.depth - kept)
            fitted = TokenTree.chain(chain)
            if tree.unused_draft_probs is not None:
                fitted.unused_draft_probs = tree.unused_draft_probs[: kept + 1]
            return fitted
        places, paths, parents = {0: 0}, [[]], [-1]
        kept_tokens: list[int] = [tokens[0]]
        for node in range(1, len(tree)):
            parent = places.get(tree.parents[node])
            if parent is None:
                continue
            path = [*paths[parent], tokens[node]]
            if self._allowed(path) < len(path):
                continue
            places[node] = len(kept_tokens)
            kept_tokens.append(tokens[node])
            paths.append(path)
            parents.append(parent)
        return TokenTree(kept_tokens, parents)

    def _error(self) -> GrammarError:
        reason = self._matcher.get_error().strip().partition("\n")[0]
        if " " not in reason:  # a word of llguidance's
            reason = "no token of this model writes what must follow"
        return GrammarError(
            f"the answer cannot go on in its grammar: {reason:.200}; ask for characters that this model's tokenizer has, or give "
            "a smaller grammar"
        )

    def _mask(self, path: tuple[int, ...]) -> np.ndarray | None:
        """uint8 [V / 8]; None behind what is no beginning of an answer. Raises `GrammarError`."""
        error = None
        for attempt in range(2):
            there = not self._lost and self._go(path)
            bits = self._matcher.compute_bitmask() if there else b""
            failed = self._lost or self._matcher.is_error()
            if there and not failed:
                return np.frombuffer(bits, np.uint8)
            error = self._error() if failed else None
            if self._recoveries == MOST_RECOVERIES:
                break
            if attempt == 0:
                self._recover()
        if error is not None:
            raise error
        return None

    def _recover(self) -> None:
        """Begin anew behind what was emitted. llguidance gives a grammar up for all who share what it compiled, on a path of
        drafts that is nobody's answer, too."""
        self._recoveries += 1
        self._matcher, self._path = self._begin(True), []
        self._lost = self._matcher.try_consume_tokens(self._emitted) != len(self._emitted)

    def _allowed(self, path: Sequence[int]) -> int:
        """How many first tokens of a path the grammar allows."""
        count = self._matcher.validate_tokens(list(path)) if self._go(()) else 0
        if self._matcher.is_error():
            self._recover()
        return count

    def _go(self, path: Sequence[int]) -> bool:
        """Stand behind `path`; False where it leaves the grammar."""
        here = self._path
        common = 0
        while common < min(len(here), len(path)) and here[common] == path[common]:
            common += 1
        if len(here) > common:
            self._matcher.rollback(len(here) - common)
            del here[common:]
        if len(path) > common:
            more = list(path[common:])
            here += more[: self._matcher.try_consume_tokens(more)]
        return len(here) == len(path)


def compile_grammar(bundle: Bundle, grammar: Grammar) -> GrammarMatcher:
    """The state at the beginning of an answer. Raises `OptionError` for what llguidance cannot read, and without it."""
    need_extra("grammar", f"{grammar.option}=")
    import llguidance

    from .tokens import grammar_tokens

    tokens = grammar_tokens(bundle)
    compiled = tokens.compiled
    key = grammar.option, grammar.source

    def begin(again: bool) -> Any:
        matcher = compiled.pop(key, None)
        if again or matcher is None:
            matcher = llguidance.LLMatcher(tokens.backend, _with_space(grammar, tokens.strips), log_level=0)
            if matcher.is_error():
                raise OptionError(f"{grammar.option}: {' '.join(matcher.get_error().split()):.300}")
        compiled[key] = matcher  # the latest is the last
        for oldest in list(compiled)[:-KEPT]:
            compiled.pop(oldest, None)
        return matcher.deep_copy()

    return GrammarMatcher(begin, tokens, grammar.parse)


def _with_space(grammar: Grammar, strips: bool) -> str:
    """In llguidance's JSON, behind a space that the text of the answer will not have where `strips`."""
    import llguidance

    if grammar.option == "schema":
        body = {"json_schema": json.loads(grammar.source)}
    elif grammar.option == "regex":
        (body,) = json.loads(llguidance.LLMatcher.grammar_from_regex(grammar.source))["grammars"]
    else:
        body = {"lark_grammar": grammar.source}
    if not strips:
        return json.dumps({"grammars": [body]})
    return json.dumps({"grammars": [{"lark_grammar": 'start: " "? @body'}, {**body, "name": "body"}]})
