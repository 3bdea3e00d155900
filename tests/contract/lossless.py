"""Whole generations: with every draft, every draft length and every limit the same tokens as transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle import NEVER, Request
from rig import Rig
from vlmexport.runtime import proposers
from vlmexport.runtime.decode.passes import Decoder
from vlmexport.runtime.decode.tree import TokenTree
from vlmexport.runtime.speculate.cycle import Generation, Limits
from vlmexport.runtime.speculate.policy import FixedLength
from vlmexport.runtime.speculate.sampling import Sampling
from vlmexport.runtime.speculate.stats import Stats

LENGTHS = (1, 2, 3, 5, 8, 16)
LIMITS = (1, 2, 3, 40)


class Scripted:
    """Proposes what `script(index)` says for output position `index`; verified by the tail, or by all segments."""

    def __init__(self, cut: int | None, script: Callable[[int], int]) -> None:
        self.name, self.cut, self.script = "scripted", cut, script

    def begin(self, request: Any) -> None:
        """Nothing to prepare."""

    def propose(self, decoder: Decoder, emitted: Sequence[int], limit: int) -> TokenTree:
        tokens = [emitted[-1], *(self.script(len(emitted) + i) for i in range(limit))]
        if self.cut is not None:
            for token in tokens:
                decoder.trunk(self.cut, token)
        return TokenTree.chain(tokens)


class ScriptedTree(Scripted):
    """Wrong branches first and deeper than the right one, which ends early: depth is not place, a leaf may be short."""

    def propose(self, decoder: Decoder, emitted: Sequence[int], limit: int) -> TokenTree:
        index = len(emitted)
        right = [self.script(index + i) for i in range(limit)]
        tokens, parents = [emitted[-1]], [-1]
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


def wrong_token(token: int, step: int = 1) -> int:
    """Another ordinary token."""
    return 3 + (token - 3 + 7 * step) % 120


def _bundled(kind: str, pick: Callable | None = None) -> Callable[[Rig, Sequence[int]], Any]:
    def make(rig: Rig, truth: Sequence[int]) -> Any:
        draft = next(d for d in rig.manifest.drafts if d.kind == kind)
        return proposers.create(draft, rig.manifest.decoder.cuts, pick)

    return make


def _at(truth: Sequence[int], index: int) -> int:
    return truth[index] if index < len(truth) else 7


DRAFTS: dict[str, Callable[[Rig, Sequence[int]], Any]] = {
    "early-exit": _bundled("early-exit"),
    "imitation": _bundled("imitation"),
    "always-wrong": _bundled("early-exit", lambda logits: int(logits.argmin())),
    "perfect": lambda rig, truth: Scripted(1, lambda i: _at(truth, i)),
    "often-right": lambda rig, truth: Scripted(
        1, lambda i: _at(truth, i) if i % 4 else wrong_token(_at(truth, i))
    ),
    "verified-by-all": lambda rig, truth: Scripted(
        None, lambda i: _at(truth, i) if i % 3 else wrong_token(_at(truth, i))
    ),
    "tree": lambda rig, truth: ScriptedTree(None, lambda i: _at(truth, i)),
}
"""What proposes: given the rig and the true output, a `Proposer`. A new draft is one line here."""


@dataclass
class Run:
    """What a generation gave."""

    tokens: tuple[int, ...]
    reason: str
    stats: Stats


def generate(
    rig: Rig, request: Request, limit: int, *, proposer: Any = None, length: int = 0, eos: Sequence[int] = (),
    sampling: Sampling | None = None, threshold: float | None = None,
) -> Run:  # fmt: skip
    """One request through the cycle."""
    logits = rig.start(request)
    stats = Stats(prompt_tokens=len(request.token_ids))
    policy = FixedLength(length, threshold) if proposer is not None else None
    generation = Generation(
        rig.decoder,
        logits[0],
        Limits(limit, tuple(eos)),
        stats,
        proposer,
        policy,
        sampling,
        list(request.token_ids),
    )
    tokens = tuple(generation)
    assert generation.finish_reason is not None
    check_stats(stats, tokens, length)
    return Run(tokens, generation.finish_reason, stats)


def check_stats(stats: Stats, tokens: Sequence[int], length: int) -> None:
    """The identities of docs/architecture.md, rule 8, from outside."""
    assert stats.tokens == len(tokens) == 1 + stats.accepted + stats.cycles - stats.discarded, stats
    assert 0 <= stats.accepted <= stats.evaluated <= stats.proposed <= stats.cycles * max(length, 0), stats
    if stats.cycles:
        assert stats.tau == (stats.accepted + stats.cycles) / stats.cycles
    if stats.evaluated:
        assert stats.alpha == stats.accepted / stats.evaluated


def greedy(rig: Rig, draft: str, seeds: Sequence[int], lengths: Sequence[int], limits: Sequence[int]) -> None:
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


def early_end(rig: Rig, draft: str, seed: int, lengths: Sequence[int], places: Sequence[int]) -> None:
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


def sampled(rig: Rig, draft: str, seeds: Sequence[int], lengths: Sequence[int]) -> None:
    """At a temperature the speculative stream equals the plain one of the same seed, token for token."""
    request = rig.request(31)
    streams = set()
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


def image_array(seed: int, height: int = 40, width: int = 52) -> np.ndarray:
    """A uint8 image [H, W, 3] with large shapes."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return np.kron(small, np.ones((height // 5, width // 7, 1), np.uint8))
