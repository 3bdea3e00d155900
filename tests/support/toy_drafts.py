"""Every kind of draft over the toy with a small vocabulary, and the law that its text must have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
from vlmexport.runtime.bundle.manifest import GenerationInfo
from vlmexport.runtime.decoder.token_tree import TokenTree
from vlmexport.runtime.drafts.prompt_lookup.prompt_lookup import PromptLookup
from vlmexport.runtime.grammars.matcher import GrammarMatcher
from vlmexport.runtime.policy.adaptive import Adaptive
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.sampling import sampler as sampling_module
from vlmexport.runtime.sampling.draft_sampling import DraftSampling
from vlmexport.runtime.sampling.logits_processors import Processors
from vlmexport.runtime.sampling.sampler import Sampling
from vlmexport.runtime.sampling.verify import Verdict
from vlmexport.runtime.speculative.cycle import Cycle
from vlmexport.runtime.speculative.proposer import Proposer
from vlmexport.runtime.speculative.sequence import Sequence as Request
from vlmexport.runtime.speculative.sequence import SequenceLimits
from vlmexport.runtime.speedup.budget import NOTHING, Budget
from vlmexport.runtime.speedup.cost_model import CostTable, Curve, DraftCosts
from vlmexport.runtime.speedup.stats import Stats

from tests.support.remembering import Remembering, remembered
from tests.support.toy import PROMPT, ToyRows, decode, started
from tests.support.toy_heads import ToyWithHeads, begin_with, medusa

Law = Callable[[Sequence[int]], np.ndarray]


def law_of_last_two(salt: int, vocabulary: int, sharpness: float = 1.0) -> Law:
    """Logits that are a function of the last two tokens."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def law(prefix: Sequence[int]) -> np.ndarray:
        key = tuple(int(token) for token in prefix[-2:])
        if key not in known:
            rng = np.random.default_rng([salt, *key])
            known[key] = (sharpness * rng.standard_normal(vocabulary)).astype(np.float32)
        return known[key]

    return law


class Likeliest(Proposer):
    """The best tokens of another law: a chain, or two below every node where there is room."""

    name = "likeliest"

    def __init__(self, law: Law) -> None:
        self.law = law

    def propose_one(self, sequence: Request, budget: Budget) -> TokenTree:
        wide = 2 if budget.nodes > budget.depth else 1
        tokens, parents, depths = [sequence.tokens[-1]], [-1], [0]
        prefixes, node = [[*PROMPT, *sequence.tokens]], 0
        while node < len(tokens):
            if depths[node] < budget.depth:
                for token in np.argsort(-self.law(prefixes[node]), kind="stable")[:wide].tolist():
                    if len(tokens) <= budget.nodes:
                        tokens.append(token)
                        parents.append(node)
                        depths.append(depths[node] + 1)
                        prefixes.append([*prefixes[node], token])
            node += 1
        return TokenTree(tokens, parents)


class OnTrunk(Likeliest):
    """The other law as a self-draft, whose draws share the target's uniforms (`SelfDraft.choose`)."""

    name = "on-trunk"

    def __init__(self, law: Law, decoder: ToyWithHeads) -> None:
        super().__init__(law)
        self._decoder = decoder

    @property
    def cut(self) -> int:
        return 1

    def step_logits(self, step: int) -> ToyRows:
        drafted = zip(*self._decoder.exit[: step + 1], strict=True)
        return ToyRows(
            [self.law([*cache, *rows]) for cache, rows in zip(self._decoder.caches, drafted, strict=True)]
        )

    def choose(self, sequence: Request, rows: ToyRows, row: int, after: list[int]) -> int:
        return sequence.propose(rows, row, after)  # type: ignore[arg-type]


class Drawn(Likeliest):
    """A chain that is drawn from the other law, which is handed over with it."""

    name = "drawn"

    def propose_one(self, sequence: Request, budget: Budget) -> TokenTree:
        tokens, q = [sequence.tokens[-1]], []
        for depth in range(budget.depth):
            q.append(sequence.sampling.probabilities(self.law([*PROMPT, *sequence.tokens, *tokens[1:]])))
            tokens.append(sampling_module.draw(q[-1], sequence.proposing(depth)))
        tree = TokenTree.chain(tokens)
        tree.draft_probs = q
        return tree


@dataclass(frozen=True)
class Case:
    """A way of drafting: a proposer, how much, and what else the request has."""

    proposer: Callable[[ToyWithHeads, Law], Proposer]
    policy: Callable[[], Any]
    options: Callable[[], dict[str, Any]] = dict
    same_stream: bool = True
    """The text is that of plain decoding with the same seed; else only its law is."""


def _eager() -> Adaptive:
    """The controller over a table where everything pays: the length varies with what was accepted."""
    costs = CostTable(
        Curve({1: 1.0, 4: 1.5}), {name: DraftCosts() for name in ("likeliest", "drawn", "medusa")}
    )
    return Adaptive(costs, Budget.chain(3))


class Hesitant(FixedLength):
    """Drafts nothing after a cycle that drafted all it might: a policy may look at what was drafted and thrown away."""

    full = False

    def allot(self, sequences: Sequence[Request]) -> list[Budget]:
        return [NOTHING] * len(sequences) if self.full else super().allot(sequences)

    def observe(self, sequence: Request, proposed: int, verdict: Verdict) -> None:
        self.full = proposed == self.length


CHAIN, TREE = (lambda: FixedLength(2)), (lambda: FixedLength(2, nodes=5))
DRAFTS = {
    "plain": Case(lambda decoder, law: Likeliest(law), lambda: FixedLength(0)),
    "chain": Case(lambda decoder, law: Likeliest(law), CHAIN),
    "tree": Case(lambda decoder, law: Likeliest(law), TREE),
    "adaptive": Case(lambda decoder, law: Likeliest(law), _eager),
    "on-trunk": Case(lambda decoder, law: OnTrunk(law, decoder), CHAIN),
    "on-trunk, confident": Case(lambda decoder, law: OnTrunk(law, decoder), lambda: FixedLength(3, 0.4)),
    "heads, chain": Case(lambda decoder, law: medusa(decoder, 2, 2), CHAIN),
    "heads, tree": Case(lambda decoder, law: medusa(decoder, 2, 2, [-1, 0, -1, 0, 2]), TREE),
    "heads, likeliest tree": Case(lambda decoder, law: medusa(decoder, 2, 3), TREE),
    "prompt lookup": Case(lambda decoder, law: PromptLookup(_named("lookup"), decoder), TREE),  # type: ignore[arg-type]
    "memory": Case(lambda decoder, law: _remembering(decoder), CHAIN),
    "memory, tree": Case(lambda decoder, law: _remembering(decoder), TREE),
    "drawn": Case(lambda decoder, law: Drawn(law), CHAIN, same_stream=False),
    "heads, drawn": Case(
        lambda decoder, law: medusa(decoder, 2, 2),
        CHAIN,
        lambda: {"drawing": DraftSampling(False)},
        same_stream=False,
    ),
    "heads, either": Case(
        lambda decoder, law: medusa(decoder, 2, 2),
        CHAIN,
        lambda: {"drawing": DraftSampling(True)},
        same_stream=False,
    ),
    "heads, either, tree": Case(
        lambda decoder, law: medusa(decoder, 2, 2),
        TREE,
        lambda: {"drawing": DraftSampling(True)},
        same_stream=True,
    ),
    "on-trunk, drawn": Case(
        lambda decoder, law: OnTrunk(law, decoder),
        CHAIN,
        lambda: {"drawing": DraftSampling(False)},
        same_stream=False,
    ),
    "on-trunk, drawn, confident": Case(
        lambda decoder, law: OnTrunk(law, decoder),
        lambda: Hesitant(3, 0.4),
        lambda: {"drawing": DraftSampling(True)},
        same_stream=False,
    ),
    "drawn, adaptive": Case(lambda decoder, law: Drawn(law), _eager, same_stream=False),
}


def _named(name: str) -> Any:
    return SimpleNamespace(name=name)


def _remembering(decoder: Any) -> Remembering:
    """Earlier answers of a vocabulary of a few tokens, which begin alike."""
    return Remembering(_named("memory"), decoder, remembered([[0, 1, 2, 0], [0, 1, 1, 2], [0, 2, 1], [1, 0]]))


@dataclass(frozen=True)
class Toy:
    """A target, a draft's law, and how one request is decoded."""

    vocabulary: int
    target: Law
    draft: Law
    sampling: Sampling
    limit: int
    eos: tuple[int, ...] = ()
    generation: GenerationInfo | None = None
    grammar: Callable[[], GrammarMatcher] | None = None
    stats: list[Stats] = field(default_factory=list)
    """Of every request that ran."""

    def processors(self) -> Processors | None:
        """Of one request."""
        if self.generation is None and self.grammar is None:
            return None
        grammar = None if self.grammar is None else self.grammar()
        return Processors.from_info(self.generation or GenerationInfo(), self.eos, PROMPT, grammar)

    def heads(self, row: np.ndarray) -> np.ndarray:
        """Two heads: the draft's law where the pending token is its best, then a law of the row alone."""
        first, second = self.draft([*row.astype(int)]), self.draft([*row[::-1].astype(int)])
        return np.stack([first, second])

    def decoder(self, max_batch: int = 1) -> ToyWithHeads:
        return ToyWithHeads(self.target, self.vocabulary, self.heads, max_batch)

    def run(self, case: Case, sampling: Sampling | None = None) -> tuple[int, ...]:
        """The tokens of one request, through the cycle."""
        decoder = self.decoder()
        proposer, processors = case.proposer(decoder, self.draft), self.processors()
        request = started(
            SequenceLimits(self.limit, self.eos), proposer, case.policy(), sampling=sampling or self.sampling,
            processors=processors, grammar=None if processors is None else processors.grammar, **case.options(),
        )  # fmt: skip
        if proposer.needs_prompt_hidden:
            begin_with(proposer, decoder, request)  # type: ignore[arg-type]
        else:
            proposer.begin(request)
        self.stats.append(request.stats)
        return tuple(decode(Cycle(decoder), decoder, request))  # type: ignore[arg-type]

    def next_law(self, emitted: Sequence[int]) -> list[Fraction]:
        """p of the next token after the prompt and what was emitted, by the definition: no cycle, no tree."""
        logits, processors = self.target([*PROMPT, *emitted]), self.processors()
        if processors is not None:
            processors.extend(emitted)
            logits = processors.apply(logits)
        shares = [Fraction(float(share)) for share in self.sampling.probabilities(logits)]
        return [share / sum(shares) for share in shares]

    def plain_law(self) -> dict[tuple[int, ...], Fraction]:
        """Probability of every text."""
        done: dict[tuple[int, ...], Fraction] = {}
        running: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
        for _ in range(self.limit):
            grown: dict[tuple[int, ...], Fraction] = {}
            for prefix, mass in running.items():
                for token, share in enumerate(self.next_law(prefix)):
                    if share:
                        (done if token in self.eos else grown)[(*prefix, token)] = mass * share
            running = grown
        return done | running
