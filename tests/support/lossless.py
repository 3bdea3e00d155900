"""Whole generations: with every draft, every draft length and every limit the same tokens as transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime import drafts as proposers
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.common.errors import GrammarError, NumericsError
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.adversarial import AdversarialProposer
from vlmexport.runtime.drafts.combined import FallbackProposer
from vlmexport.runtime.drafts.prompt_lookup.prompt_lookup import PromptLookup
from vlmexport.runtime.engines.base import DTYPES
from vlmexport.runtime.grammars.matcher import GrammarMatcher
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.sampling.logits_processors import Processors
from vlmexport.runtime.sampling.sampler import Sampling, counter_uniform, draw
from vlmexport.runtime.speculative.cycle import Cycle
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speculative.sequence import Sequence, SequenceLimits
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.stats import Stats

from tests.support import grammars
from tests.support.oracle import NEVER, Request
from tests.support.remembering import Remembering, edited, remembered, wrong_token
from tests.support.rig import Rig
from tests.support.tiny_bundles import ATTENDING, BUNDLES, WITH_MTP
from tests.support.toy_heads import without_tree

LENGTHS = (1, 2, 3, 5, 8, 16)
LIMITS = (1, 2, 3, 40)
NODES = 11
"""Drafted tokens of a tree, for drafts that have a `nodes` here; the length is then the depth."""


class Scripted(Proposer):
    """Proposes what `script(index)` says for output position `index`; verified by the tail, or by all segments."""

    def __init__(self, rig: Rig, cut: int | None, script: Callable[[int], int]) -> None:
        self.name, self._cut, self.script = "scripted", cut, script
        self._inner = None if cut is None else _early_exit(rig)

    @property
    def cut(self) -> int | None:
        return self._cut

    def step_logits(self, step: int) -> Any:
        """The trunk's rows; the script does not look at them."""
        assert self._inner is not None
        return self._inner.step_logits(step)

    def choose(self, sequence: Sequence, rows: Any, row: int, after: list[int]) -> int:
        """What the script says."""
        return self.script(len(sequence.tokens) + len(after))

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        index = len(sequence.tokens)
        return TokenTree.chain([sequence.tokens[-1], *(self.script(index + i) for i in range(budget.depth))])


class Bushy(Scripted):
    """Every node of the right path has wrong siblings on both sides, until the budget is used up."""

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        index, tokens, parents, node = len(sequence.tokens), [sequence.tokens[-1]], [-1], 0
        wide = max(1, budget.nodes // budget.depth)
        for depth in range(budget.depth):
            right, before = self.script(index + depth), (depth * 5) % wide
            for place in range(wide):
                tokens.append(right if place == before else wrong_token(right, 1 + place))
                parents.append(node)
            node = len(tokens) - wide + before
        return TokenTree(tokens, parents)


class ScriptedTree(Scripted):
    """Wrong branches first and deeper than the right one, which ends early: depth is not place, a leaf may be short."""

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        index, limit = len(sequence.tokens), budget.depth
        right = [self.script(index + i) for i in range(limit)]
        tokens, parents = [sequence.tokens[-1]], [-1]
        deep = max(0, limit - 2)
        for i in range(deep):  # a wrong branch, as deep as it may be
            tokens.append(wrong_token(right[0], 5 + i))
            parents.append(len(tokens) - 2)
        node = 0
        for token in right[: limit - deep]:
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
        return TokenTree(tokens, parents)


class Drawn(Scripted):
    """Tokens drawn from a distribution of its own, which is handed over with them: accepted by min(1, p/q)."""

    def propose_one(self, sequence: Sequence, budget: Budget) -> TokenTree:
        index, rng = len(sequence.tokens), np.random.default_rng(len(sequence.tokens))
        vocabulary, tokens, q = self.script(-1), [sequence.tokens[-1]], []
        for i in range(budget.depth):
            weights = rng.random(vocabulary) ** 8
            q.append(weights / weights.sum())
            tokens.append(draw(q[-1], counter_uniform(17, index + i)))
        tree = TokenTree.chain(tokens)
        tree.draft_probs = q
        return tree


def _early_exit(rig: Rig) -> Any:
    return proposers.create(next(d for d in rig.manifest.drafts if d.kind == "early-exit"), rig.decoder)


def _bundled(kind: str) -> Callable[[Rig, Items[int]], Any]:
    def make(rig: Rig, truth: Items[int]) -> Any:
        return proposers.create(next(d for d in rig.manifest.drafts if d.kind == kind), rig.decoder)

    return make


def _attending(rig: Rig, truth: Items[int]) -> Any:
    """The imitation network with attention, which bundles of two cuts have."""
    draft = rig.manifest.draft(f"imitation@{ATTENDING}")
    assert draft is not None and draft.options.own_cache is not None
    return proposers.create(draft, rig.decoder)


def _combined(kind: str) -> Callable[[Rig, Items[int]], Any]:
    """Prompt lookup first; after a single token, so that both propose in turn."""

    def make(rig: Rig, truth: Items[int]) -> Any:
        draft = rig.manifest.choose_draft(f"prompt-lookup+{kind}")
        assert draft is not None
        second = proposers.create(replace(draft, name=f"{kind} of {draft.name}"), rig.decoder)
        return FallbackProposer(draft.name, PromptLookup(draft, rig.decoder), second)

    return make


def _remembering(second: str | None = None) -> Callable[[Rig, Items[int]], Any]:
    """A memory alone, or before another draft."""

    def make(rig: Rig, truth: Items[int]) -> Any:
        name = "memory" if second is None else f"memory+{second}"
        draft = rig.manifest.choose_draft(name)
        assert draft is not None and draft.name == name
        first = Remembering(draft, rig.decoder, remembered(edited(truth)), 1 if second is None else 2)
        if second is None:
            return first
        behind = rig.manifest.choose_draft(second)
        assert behind is not None
        own = replace(behind, name=f"{behind.name} of {name}") if "+" not in second else behind
        return FallbackProposer(name, first, proposers.create(own, rig.decoder))

    return make


def _bundled_for_requests(name: str) -> Callable[[Rig, Items[int]], Any]:
    """A draft that no bundle lists."""

    def make(rig: Rig, truth: Items[int]) -> Any:
        draft = rig.manifest.choose_draft(name)
        assert draft is not None and draft.name == name
        return proposers.create(draft, rig.decoder)

    return make


def _branching(tree: bool) -> Callable[[Rig, Items[int]], Any]:
    """Medusa with room for branches: of the bundle's tree, or of the likeliest paths by its own probabilities."""

    def make(rig: Rig, truth: Items[int]) -> Any:
        draft = next(d for d in rig.manifest.drafts if d.kind == "medusa")
        assert draft.options.static_tree is not None
        proposer = proposers.create(draft if tree else without_tree(draft), rig.decoder)
        proposer.nodes = NODES  # type: ignore[attr-defined]
        return proposer

    return make


def _growing(kind: str) -> Callable[[Rig, Items[int]], Any]:
    """A layer of its own with room for branches."""

    def make(rig: Rig, truth: Items[int]) -> Any:
        proposer = _bundled(kind)(rig, truth)
        proposer.nodes = NODES
        return proposer

    return make


def bundle_of(family: str, draft: str) -> str:
    """The bundle of a family that has such a draft."""
    return f"{family}-two-cuts" if "attending" in draft else family


def fits(family: str, draft: str) -> bool:
    """Whether the bundle `family` has such a draft: ViSpec sees pictures among the rows of a decoder."""
    if draft in SCRIPTED_TREES and BUNDLES[family].weights is not None:
        return False
    if draft == "mtp":
        return BUNDLES[family].checkpoint in WITH_MTP
    if "attending" in draft:
        return ATTENDING in BUNDLES[family].draft_layers
    if draft.startswith("eagle3"):
        return BUNDLES[family].taps is not None
    return "vispec" not in draft or BUNDLES[family].sees


SCRIPTED_TREES = ("tree", "bushy")
"""They propose trees whatever they are allotted: with integer weights a target verifies chains."""


def runs_on(engine: str, draft: str) -> bool:
    """Whether an engine of the contract table has such a draft: plans cannot share the target's weights."""
    return draft != "draft-and-verify" or not engine.startswith("tensorrt")


def drafts_of(bundle: str, engine: str) -> list[str]:
    """Names in `DRAFTS` of what a bundle has and an engine of the contract table runs."""
    return [name for name in DRAFTS if fits(bundle, name) and runs_on(engine, name)]


def _wrong(rig: Rig, truth: Items[int]) -> Any:
    return AdversarialProposer(_early_exit(rig), rig.manifest.text.vocab_size)


def _at(truth: Items[int], index: int) -> int:
    return truth[index] if index < len(truth) else 7


DRAFTS: dict[str, Callable[[Rig, Items[int]], Any]] = {
    "early-exit": _bundled("early-exit"),
    "imitation": _bundled("imitation"),
    "imitation-attending": _attending,
    "draft-and-verify": _bundled("draft-and-verify"),
    "medusa": _bundled("medusa"),
    "medusa-tree": _branching(tree=True),
    "medusa-likeliest": _branching(tree=False),
    "eagle": _bundled("eagle"),
    "eagle-tree": _growing("eagle"),
    "eagle3": _bundled("eagle3"),
    "eagle3-tree": _growing("eagle3"),
    "vispec": _bundled("vispec"),
    "vispec-tree": _growing("vispec"),
    "mtp": _bundled("mtp"),
    "prompt-lookup": _bundled("prompt-lookup"),
    "prompt-lookup+eagle": _combined("eagle"),
    "prompt-lookup+medusa": _combined("medusa"),
    "prompt-lookup+vispec": _combined("vispec"),
    "memory": _remembering(),
    "memory+prompt-lookup": _remembering("prompt-lookup"),
    "memory+medusa": _remembering("medusa"),
    "memory+eagle": _remembering("eagle"),
    "always-wrong": _wrong,
    "perfect": lambda rig, truth: Scripted(rig, 1, lambda i: _at(truth, i)),
    "often-right": lambda rig, truth: Scripted(
        rig, 1, lambda i: _at(truth, i) if i % 4 else wrong_token(_at(truth, i))
    ),
    "verified-by-all": lambda rig, truth: Scripted(
        rig, None, lambda i: _at(truth, i) if i % 3 else wrong_token(_at(truth, i))
    ),
    "tree": lambda rig, truth: ScriptedTree(rig, None, lambda i: _at(truth, i)),
}
"""What proposes: given the rig and the true output, a `Proposer`. A new draft is one line here."""

SHARED = (
    "early-exit",
    "imitation",
    "imitation-attending",
    "imitation-attending-wrong",
    "draft-and-verify",
    "medusa",
    "medusa-tree",
    "medusa-likeliest",
    "eagle",
    "eagle-tree",
    "eagle-wrong",
    "eagle3",
    "eagle3-tree",
    "vispec",
    "vispec-tree",
    "vispec-wrong",
    "always-wrong",
    "mtp",
    "prompt-lookup",
    "prompt-lookup+eagle",
    "prompt-lookup+medusa",
    "prompt-lookup+vispec",
)
"""Drafts of a bundle: one proposer for all sequences."""


@dataclass
class Run:
    """What a generation gave."""

    tokens: tuple[int, ...]
    reason: str
    stats: Stats
    error: NumericsError | GrammarError | None = None


def generate(
    rig: Rig, request: Request, limit: int, *, proposer: Any = None, length: int = 0, eos: Items[int] = (),
    sampling: Sampling | None = None, threshold: float | None = None, asked: GenerationInfo | None = None,
) -> Run:  # fmt: skip
    """One request through the cycle."""
    one = Ask(request, limit, proposer, length, tuple(eos), sampling or Sampling(), threshold, asked=asked)
    run = generate_batch(rig, [one])[0]
    if run.error is not None:
        raise run.error
    return run


@dataclass
class Ask:
    """One request of a batch."""

    request: Request
    limit: int
    proposer: Any = None
    length: int = 0
    eos: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    threshold: float | None = None
    nodes: int | None = None
    """Drafted tokens of a tree; None takes the proposer's `nodes`, if it has any."""
    stop: int | None = None
    """The consumer ends the request at this token, as a stop string does."""
    asked: GenerationInfo | None = None
    """What a model's configuration asks of decoding."""
    grammar: GrammarMatcher | None = None


def generate_batch(rig: Rig, asked: Items[Ask], together: int = 1) -> list[Run]:
    """Requests through the cycle, at most `together` at a time; who ends makes room for who waits."""
    decoder, cycle = rig.decoder, Cycle(rig.decoder)
    decoder.reset(0)
    waiting, runs = list(enumerate(asked)), {}
    numbers: dict[Sequence, tuple[int, Ask]] = {}
    while waiting or cycle.sequences:
        while waiting and len(cycle.sequences) < together:
            number, ask = waiting.pop(0)
            policy = None
            if ask.proposer is not None:
                nodes = getattr(ask.proposer, "nodes", None) if ask.nodes is None else ask.nodes
                policy = FixedLength(ask.length, ask.threshold, nodes)
            first, processors = rig.first_ids(ask.request), None
            if ask.asked is not None or ask.grammar is not None:
                processors = Processors.from_info(ask.asked or GenerationInfo(), ask.eos, first, ask.grammar)
            sequence = Sequence(
                first,
                SequenceLimits(ask.limit, ask.eos),
                Stats(),
                ask.sampling,
                ask.proposer,
                policy,
                processors,
                grammar=ask.grammar,
            )
            rows = rig.join(ask.request, sequence)
            if ask.proposer is not None:
                ask.proposer.begin(sequence)
            cycle.join(sequence)
            numbers[sequence] = (number, ask)
            consume(sequence, ask, [sequence.choose(rows, 0, [])])
        for sequence in [s for s in cycle.sequences if s.finish_reason is not None]:
            number, ask = numbers[sequence]
            cycle.leave(sequence)
            if ask.proposer is not None:
                ask.proposer.end(sequence)
            sequence.finish()
            nodes = getattr(ask.proposer, "nodes", 0) if ask.nodes is None else ask.nodes
            most = ask.length if ask.length == 0 else max(ask.length, nodes)
            check_stats(sequence.stats, sequence.tokens, most)
            if rig.manifest.target_weights is not None:
                assert all(nodes == depth for nodes, depth in sequence.stats.shapes), "integers verify chains"
            reason, error = sequence.finish_reason or "", sequence.error
            runs[number] = Run(tuple(sequence.tokens), reason, sequence.stats, error)
        if cycle.sequences:
            for sequence, tokens in zip(list(cycle.sequences), cycle.run(), strict=True):
                consume(sequence, numbers[sequence][1], tokens)
    return [runs[number] for number in range(len(asked))]


def consume(sequence: Sequence, ask: Ask, tokens: list[int]) -> None:
    """Take the tokens of a cycle; who asked for an end at a token stops there, in the middle of the cycle."""
    for token in sequence.emit(tokens):
        if token == ask.stop:
            sequence.stop("stop")


def check_stats(stats: Stats, tokens: Items[int], length: int) -> None:
    """The identities of docs/contributing/rooms-and-rules.md, rule 8, from outside."""
    assert stats.tokens == len(tokens) == 1 + stats.accepted + stats.cycles - stats.discarded, stats
    assert 0 <= stats.accepted <= stats.evaluated <= stats.proposed <= stats.cycles * max(length, 0), stats
    if stats.cycles:
        assert stats.tau == (stats.accepted + stats.cycles) / stats.cycles
    if stats.evaluated:
        assert stats.alpha == stats.accepted / stats.evaluated


def greedy(rig: Rig, draft: str, seeds: Items[int], lengths: Items[int], limits: Items[int]) -> None:
    """Equal to `generate`, for every length and limit."""
    for seed in seeds:
        request = rig.request(seed)
        truth = rig.oracle.greedy(request, max(limits))
        for length in lengths:
            for limit in limits:
                run = generate(rig, request, limit, proposer=DRAFTS[draft](rig, truth), length=length)
                assert run.tokens == truth[:limit], (
                    f"{draft}, d = {length}, limit {limit}: {run.tokens}, wanted {truth}"
                )
                assert run.reason == "length"
                if draft == "perfect":
                    assert run.stats.accepted == run.stats.proposed, "a perfect draft was rejected"
                if draft == "always-wrong":
                    assert run.stats.accepted == 0


GRAMMAR_DRAFTS: dict[str, Callable[[Rig, Items[int]], Any]] = {
    **DRAFTS,
    "plain": lambda rig, truth: None,
    "grammar": _bundled_for_requests("grammar"),
    "grammar+prompt-lookup": _bundled_for_requests("grammar+prompt-lookup"),
    "grammar+medusa": _bundled_for_requests("grammar+medusa"),
    "grammar+eagle": _bundled_for_requests("grammar+eagle"),
    "memory+grammar": _remembering("grammar"),
    "memory+grammar+medusa": _remembering("grammar+medusa"),
    "drawn": lambda rig, truth: Drawn(rig, None, lambda i: rig.manifest.text.vocab_size),
}
"""What proposes to a request with a grammar."""


def in_a_grammar(rig: Rig, draft: str, together: int) -> None:
    """Equal to the likeliest allowed token after token; at a temperature to plain decoding of the same seed, and within the
    grammar."""
    vocabulary = rig.manifest.text.vocab_size
    asked, wanted = [], []
    for number in range(together + 2):
        request, limit = rig.request(60 + number, 1 + 3 * number % 17), (60, 60, 9)[number % 3]
        sampling = Sampling(temperature=1.5, seed=number) if number % 4 == 3 else Sampling()
        want = grammars.greedy(rig.oracle, request, limit)
        if not sampling.greedy and draft != "drawn":
            ask = Ask(
                request, limit, eos=(grammars.END,), sampling=sampling, grammar=grammars.matcher(vocabulary)
            )
            want = generate_batch(rig, [ask])[0].tokens
        proposer = GRAMMAR_DRAFTS[draft](rig, want)
        length = 0 if proposer is None else LENGTHS[number % 5 + 1]
        asked.append(
            Ask(
                request,
                limit,
                proposer,
                length,
                (grammars.END,),
                sampling,
                grammar=grammars.matcher(vocabulary),
            )
        )
        wanted.append(want)
    runs = generate_batch(rig, asked, together)
    for number, (run, want) in enumerate(zip(runs, wanted, strict=True)):
        assert run.error is None, f"{draft}, request {number}: {run.error}"
        if draft != "drawn" or asked[number].sampling.greedy:
            assert run.tokens == want, f"{draft}, request {number}: {run.tokens}, wanted {want}"
        assert run.reason == ("eos" if run.tokens[-1] == grammars.END else "length")
        for at, token in enumerate(run.tokens):
            assert grammars.allowed(run.tokens[:at], vocabulary)[token]
    assert any(run.reason == "eos" for run in runs)
    if draft.startswith(("grammar", "memory+grammar")):
        assert sum(run.stats.accepted for run in runs) > 0


def early_end(rig: Rig, draft: str, seed: int, lengths: Items[int], places: Items[int]) -> None:
    """An end token anywhere in a cycle ends the output there, and nothing comes after it."""
    request = rig.request(seed)
    whole = rig.oracle.greedy(request, 40)
    for place in places:
        eos = whole[place]
        truth = rig.oracle.greedy(request, 40, eos)
        assert truth[-1] == eos and eos not in truth[:-1]
        for length in lengths:
            run = generate(rig, request, 40, proposer=DRAFTS[draft](rig, whole), length=length, eos=[eos])
            assert run.tokens == truth, f"{draft}, d = {length}, end at {place}: {run.tokens}, wanted {truth}"
            assert run.reason == "eos"
    assert (
        generate(rig, request, 9, proposer=DRAFTS[draft](rig, whole), length=4, eos=[NEVER]).tokens
        == whole[:9]
    )


def sampled(rig: Rig, draft: str, seeds: Items[int], lengths: Items[int]) -> None:
    """At a temperature the speculative stream equals the plain one of the same seed, token for token."""
    request = rig.request(31)
    streams = set()
    options: dict[str, Any]
    for seed in seeds:
        for options in (
            {"temperature": 1.3},
            {"temperature": 2.5, "top_k": 7},
            {"temperature": 1.7, "top_p": 0.9},
        ):
            sampling = Sampling(seed=seed, **options)
            plain = generate(rig, request, 24, sampling=sampling).tokens
            streams.add(plain)
            for length in lengths:
                proposer = DRAFTS[draft](rig, plain)
                run = generate(rig, request, 24, proposer=proposer, length=length, sampling=sampling)
                assert run.tokens == plain, f"{draft}, d = {length}, {sampling}: {run.tokens}, plain {plain}"
    assert len(streams) == 3 * len(seeds), "other seeds and options must give other streams"


def batch(rig: Rig, draft: str, together: int, count: int) -> None:
    """Requests of a batch get what each gets alone: greedy ones equal `generate`, sampled ones their own stream."""
    made: dict[str, Any] = {}
    asked, wanted = [], []
    names = [draft] if draft not in MIXED else drafts_of(rig.tiny.name, rig.column)
    drafting = 0
    for number in range(max(count, len(names) + len(names) // 5 + 1)):
        request = rig.request(60 + number, 1 + 3 * number % 17)
        limit, eos = 5 + 7 * number % 23, ()
        truth = rig.oracle.greedy(request, 30)
        sampling = Sampling(temperature=1.5, seed=number) if number % 5 == 4 else Sampling()
        if not sampling.greedy:
            want = generate(rig, request, limit, sampling=sampling).tokens
        elif number % 3 == 1:
            eos = (truth[number % 7],)
            want = rig.oracle.greedy(request, limit, eos[0])
        else:
            want = truth[:limit]
        proposer = None
        if number % 6 != 5:  # some decode plainly beside the others
            name = names[drafting % len(names)]
            drafting += 1
            # Drafts of a bundle serve all their sequences together; scripts know one output.
            proposer = (
                made.setdefault(name, DRAFTS[name](rig, ())) if name in SHARED else DRAFTS[name](rig, truth)
            )
        length = 0 if proposer is None else LENGTHS[number % 4]
        asked.append(Ask(request, limit, proposer, length, eos, sampling))
        wanted.append(want)
    assert drafting >= len(names), "every draft has a turn"
    for number, (run, want) in enumerate(zip(generate_batch(rig, asked, together), wanted, strict=True)):
        assert run.tokens == want, (
            f"{draft}, {together} together, request {number}: {run.tokens}, wanted {want}"
        )


MIXED = ("mixed", "mixed-attending")
"""All drafts of a bundle side by side: of the family's own, and of that with two cuts."""

SHAPES = {"chain": (5, 5), "tree of 8": (4, 8), "tree of 30": (5, 30)}
"""Depth and drafted tokens of a proposal."""

MATRIX_DRAFTS: dict[str, Callable[[Rig, Items[int]], Any]] = {
    name: DRAFTS[name]
    for name in (
        "early-exit",
        "imitation",
        "imitation-attending",
        "draft-and-verify",
        "medusa-tree",
        "medusa-likeliest",
        "eagle",
        "eagle3",
        "vispec",
        "prompt-lookup",
        "prompt-lookup+medusa",
        "memory",
        "memory+medusa",
        "always-wrong",
    )
} | {
    "imitation-attending-wrong": lambda rig, truth: AdversarialProposer(
        _attending(rig, truth), rig.manifest.text.vocab_size
    ),
    "eagle-wrong": lambda rig, truth: AdversarialProposer(
        DRAFTS["eagle"](rig, truth), rig.manifest.text.vocab_size
    ),
    "vispec-wrong": lambda rig, truth: AdversarialProposer(
        DRAFTS["vispec"](rig, truth), rig.manifest.text.vocab_size
    ),
    "bushy": lambda rig, truth: Bushy(
        rig, None, lambda i: _at(truth, i) if i % 5 else wrong_token(_at(truth, i))
    ),
}


def matrix(rig: Rig, draft: str, shape: str, end: str, together: int, temperature: float) -> None:
    """Requests that all end in one way, decoded `together`, get the tokens of `generate`, or at a temperature those of
    plain decoding alone with the same seed."""
    depth, nodes = SHAPES[shape]
    make, limit, known = MATRIX_DRAFTS[draft], 20, {}
    asked, wanted = [], []
    for number in range(together + 2 if together > 1 else 3):
        request = rig.request(60 + number, 1 + 3 * number % 17)
        sampling = Sampling(temperature=temperature, seed=number)
        if temperature:
            whole = generate(rig, request, limit, sampling=sampling).tokens
        else:
            whole = rig.oracle.greedy(request, limit)
        at = number * 7 % limit
        ending = {
            "eos": Ask(request, limit, eos=(whole[at],)),
            "stop": Ask(request, limit, stop=whole[at]),
            "limit": Ask(request, at + 1),
        }[end]
        want = whole[: at + 1] if end == "limit" else whole[: whole.index(whole[at]) + 1]
        proposer = known.setdefault(draft, make(rig, ())) if draft in SHARED else make(rig, whole)
        asked.append(replace(ending, proposer=proposer, length=depth, nodes=nodes, sampling=sampling))
        wanted.append((want, {"limit": "length"}.get(end, end)))
    runs = generate_batch(rig, asked, together)
    for number, (run, (want, reason)) in enumerate(zip(runs, wanted, strict=True)):
        assert run.tokens == want, f"request {number}: {run.tokens}, wanted {want}"
        assert run.reason == reason or len(want) == limit
    most = max(nodes for run in runs for nodes, _ in [(0, 0), *run.stats.shapes])
    assert most > 0 or draft == "prompt-lookup", "nothing was drafted"
    if draft == "bushy":
        assert most > nodes - depth, "trees as large as asked for"
    if draft.startswith("medusa") and nodes > depth and end != "limit":
        assert most > depth, "trees with branches"


def one_ends(rig: Rig, draft: str) -> None:
    """Numbers of one sequence of a batch that are not finite end that one; the others, and who joins in its place, get
    what each gets alone."""
    cycle = Cycle.run
    for place in (1, 2):
        asked, wanted = [], []
        for number in range(5):
            request, limit = rig.request(90 + number, 3 + 5 * number % 13), 5 + 4 * number % 9
            truth = rig.oracle.greedy(request, limit)
            proposer = None if number == 0 else DRAFTS[draft](rig, truth)
            asked.append(Ask(request, limit, proposer, 0 if proposer is None else 3))
            wanted.append(truth)
        cycles = 0

        def damaged(self: Cycle, place: int = place) -> Any:
            nonlocal cycles
            cycles += 1
            if cycles == 2:
                encoder = rig.decoder.encoder
                for arena in (rig.decoder.arena, *([] if encoder is None else [encoder.arena])):
                    for layer in range(len(arena.layers)):
                        for view in arena.views(layer, place, 1).values():
                            rig.engine.write(view, np.full(view.shape, np.nan, DTYPES[view.dtype]))
            return cycle(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Cycle, "run", damaged)
            runs = generate_batch(rig, asked, 3)
        for number, (run, want) in enumerate(zip(runs, wanted, strict=True)):
            if number == place:
                assert run.reason == "error" and "not finite" in str(run.error), f"request {number}: {run}"
                assert run.tokens == want[: len(run.tokens)] and len(run.tokens) < len(want)
            else:
                assert (run.tokens, run.error) == (want, None), (
                    f"{draft}, request {number} after {place} failed"
                )


def image_array(seed: int, height: int = 40, width: int = 52) -> np.ndarray:
    """A uint8 image [H, W, 3] with large shapes."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.kron(small, np.ones((height // 5, width // 7, 1), np.uint8))
