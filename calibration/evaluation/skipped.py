"""Chains that a target drafts without some of its sublayers, on texts that it wrote greedily.

What such a draft looks at when a chain begins are the target's own keys and values of the text before, whatever was
drafted there; behind them it looks at its own. So from every place of a text one chain can be drafted, all places side by
side, and any policy's cycles follow from the chains exactly: no clock, and no cache that is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...exporter.families.common.cached_rows import cached_rows
from ...exporter.families.common.layer_skip import Sublayers, attention_of, left_out
from ...exporter.families.common.reference import collate, decoder_prefix
from ...exporter.parity.capture import caches, whole_cache
from ...runtime.graphs.values import CONV_SLOTS, MASKS, mask_of_layer
from ...runtime.policy.base import DraftPolicy
from ...runtime.sampling.verify import Verdict
from ...runtime.speedup.stats import Stats
from ..data.reading.records import Record
from ..objectives.losses import overlap
from ..targets.batches import Batches
from ..targets.target import Target
from .acceptance import Counted, chain_cycles, likeliest

TOGETHER = 64
"""Chains of a text that are drafted side by side: each has keys and values of its own."""


@dataclass(frozen=True)
class Known:
    """What the target made of one text of n tokens behind a prompt: all that a draft reads.

    `entering` [N, E] are hidden states that enter layer 0, positions included, `embedded` the embeddings of those of the text's
    tokens that were read, [n − 1, E]; `angles` (cos, sin) [N, D / 2] by layer where positions are rotary; `masks` [heads, N, N] as
    graphs take them, by name; `caches` [1, heads, T, size] by layer and name, `cross` (keys, values) by layer. `first` is the slot of the first token.
    """

    tokens: tuple[int, ...]
    first: int
    entering: Tensor
    embedded: Tensor
    angles: list[tuple[Tensor, Tensor]]
    masks: dict[str, Tensor]
    caches: list[dict[str, Tensor]]
    cross: list[tuple[Tensor, Tensor]]
    logits: Tensor
    """[n − 1, V] the target's own behind each token but the last."""


@dataclass(frozen=True)
class Chains:
    """Drafted tokens [n − 1][depth] behind each token of a text but the last, with how likely the draft found them.
    A chain is no longer than what is left of the text, and ends where it leaves it."""

    tokens: list[list[int]]
    confidences: list[list[float]]
    right: list[list[bool]]
    ended: bool
    """Whether the text ends in an end token."""


@torch.no_grad()
def known(target: Target, record: Record) -> Known:
    """The target's own pass over the text of a record."""
    prompt, answer, family = target.prompt(record), target.answer(record), target.family
    inputs = target.moved(collate(family, [prompt], [answer[:-1]]))
    seen: dict[str, Any] = {"angles": []}

    def enters(_layer: Any, args: Any, kwargs: Any) -> None:
        seen.setdefault("hidden_states", args[0] if args else kwargs["hidden_states"])
        seen["angles"] += _halves(kwargs.get("position_embeddings"))

    def biased(_layer: Any, _args: Any, output: Any) -> None:
        seen["bias"] = output[1] if isinstance(output, tuple) else None

    hooks = [layer.register_forward_pre_hook(enters, with_kwargs=True) for layer in target.layers]
    hooks.append(target.layers[0].register_forward_hook(biased))
    try:
        output = target.model(**inputs, **whole_cache(family))
    finally:
        for hook in hooks:
            hook.remove()
    own, cross = caches(output, family.decoder.cross_attention)
    first = len(decoder_prefix(prompt))
    return Known(
        answer,
        first,
        seen["hidden_states"][0],
        target.embed(torch.tensor(answer[:-1], device=target.device)),
        seen["angles"],
        _masks(target, seen["hidden_states"].shape[1], seen.get("bias")),
        [cached_rows(layer) for layer in own.layers],
        [] if cross is None else [(layer.keys, layer.values) for layer in cross.layers],
        output.logits[0, first:],
    )


def _halves(angles: Any) -> list[tuple[Tensor, Tensor]]:
    """Angles of one layer, if it has any, as the hooked layers take them: transformers writes each twice."""
    if angles is None:
        return []
    cos, sin = (each[0, :, : each.shape[-1] // 2] for each in angles)
    return [(cos, sin)]


def _masks(target: Target, length: int, bias: Tensor | None) -> dict[str, Tensor]:
    """[heads, length, length] each: a token sees itself and what is before it, of that what a window holds, or with T5's
    bias on top. A prompt's blocks do not matter: chains follow tokens of the text behind it."""
    full, sliding = MASKS.values()
    seen = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()[None]
    if target.decoder.mask_dtype == "bool":
        return {full: seen, sliding: seen.triu(1 - (target.decoder.sliding_window or length))}
    assert bias is not None
    return {full: bias[0].masked_fill(~seen, torch.finfo(bias.dtype).min)}


@torch.no_grad()
def chains(
    target: Target,
    text: Known,
    skip: Sublayers,
    depth: int,
    least: float = 0.0,
    seen: Callable[[Tensor, Tensor], None] = lambda places, logits: None,
    together: Batches | None = None,
) -> Chains:
    """Chains of the likeliest tokens, at most `depth` long; none goes on behind an end token, or one that the draft finds
    less likely than `least`. `seen(places, logits)` is told of the draft's logits [n, V] right behind the tokens at `places`
    int64 [n]. `together` is how many chains are drafted side by side."""
    count, eos = len(text.tokens) - 1, set(target.eos_token_ids)
    result = Chains(
        [[] for _ in range(count)],
        [[] for _ in range(count)],
        [[] for _ in range(count)],
        text.tokens[-1] in eos,
    )

    def draft(some: Sequence[int]) -> tuple[Tensor, Tensor]:
        for place in some:  # what a try that found no memory left
            for each in (result.tokens, result.confidences, result.right):
                each[place].clear()
        places = torch.tensor(some, device=target.device)
        drafting = _Drafting(target, text, skip, places)
        ids = torch.tensor(text.tokens, device=target.device)[places]
        first = None
        for step in range(depth):
            logits = drafting.step(ids)
            first = logits if first is None else first
            shares, ids = logits.softmax(-1).max(-1)
            live = []
            for place, token, share in zip(
                drafting.places.tolist(), ids.tolist(), shares.tolist(), strict=True
            ):
                right = result.right[place]
                result.tokens[place].append(token)
                result.confidences[place].append(share)
                right.append(token == text.tokens[place + step + 1] and all(right))
                live.append(token not in eos and share >= least and place + step + 1 < count)
            if not any(live):
                break
            if not all(live):
                kept = torch.tensor(live, device=target.device)
                drafting.keep(kept)
                ids = ids[kept]
        assert first is not None
        return places, first

    together = together or side_by_side()
    with target.family.language.hooks(), _exported(target):
        for _, (places, logits) in together.over(range(count), draft):
            seen(places, logits)
    return result


def side_by_side(report: Callable[[str], None] = lambda line: None) -> Batches:
    """How many chains are drafted at once: at first TOGETHER."""
    return Batches(TOGETHER, report, "chains of a draft without sublayers", flag=None)


def _exported(target: Target) -> Any:
    """Lets the target's layers attend as graphs do, where the caches that they are given are."""
    from ...exporter.graphs.hooks import ATTENTION, replaced

    attention: Any = attention_of(target.family.language, target.layers[0])[0]
    return replaced(attention.config, "_attn_implementation", ATTENTION)


class _Drafting:
    """Chains that begin at `places` int64 [n] of a text, with the keys and values that each has made."""

    def __init__(self, target: Target, text: Known, skip: Sublayers, places: Tensor) -> None:
        self.places, self._step = places, 0
        self._target, self._text, self._skip = target, text, skip
        self._own: dict[int, dict[str, Tensor]] = {}

    def keep(self, kept: Tensor) -> None:
        """Go on with those of the chains for which bool [n] says so."""
        self.places = self.places[kept]
        self._own = {
            index: {name: rows[kept] for name, rows in caches.items()} for index, caches in self._own.items()
        }

    def step(self, ids: Tensor) -> Tensor:
        """Logits [n, V] behind the next token int64 [n] of every chain."""
        target, text, skip = self._target, self._text, self._skip
        language, count, slots = (
            target.family.language,
            len(self.places),
            text.first + self.places + self._step,
        )
        self._step += 1
        # What positions add to a row is what they added to the text's own token there.
        added = text.entering[slots] - text.embedded[slots - text.first]
        hidden = (target.embed(ids) + added)[:, None]
        given: dict[str, Any] = {"write_indices": slots}
        if (kernel := target.decoder.conv_kernel) is not None:
            back = torch.arange(kernel - 1, 0, -1, device=target.device)
            given[CONV_SLOTS] = (slots[:, None, None] - back).clamp(min=-1)
        masks = {name: mask[:, slots].transpose(0, 1)[:, :, None] for name, mask in text.masks.items()}
        if text.cross:
            shape = (count, 1, 1, text.cross[0][0].shape[2])
            given["cross_mask"] = torch.ones(shape, dtype=torch.bool, device=target.device)
        for index, layer in enumerate(target.layers):
            attention, mlp = index in skip.attention, index in skip.mlp
            if attention and mlp:
                continue
            known = text.caches[index]
            caches: dict[str, Any] = (
                dict.fromkeys(known) if attention else self._own.get(index) or _each(known, count)
            )
            given |= {"hidden": hidden, **caches}
            mask = mask_of_layer(target.decoder.layer_types, index)
            given["attn_mask"] = None if mask is None else masks[mask]
            if text.angles:
                given["cos"], given["sin"] = (each[slots][:, None] for each in text.angles[index])
            if text.cross:
                given["cross_key"], given["cross_value"] = (
                    each.expand(count, -1, -1, -1) for each in text.cross[index]
                )
            with left_out(language, layer, attention=attention, mlp=mlp):
                hidden, *updated = language.run_layer(layer, given)
            if not attention:
                self._own[index] = dict(zip(known, updated, strict=True))
        return target.head(hidden[:, 0])


def _each(caches: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """[1, …] for each of `count` chains, without copies."""
    return {name: rows.expand(count, -1, -1, -1) for name, rows in caches.items()}


def replay(chains: Chains, policy: DraftPolicy, end_tokens: Collection[int]) -> Stats:
    """The cycles that `policy` makes of the chains of one text, as the runtime counts them. A draft that goes on beyond
    the end of the text is counted as far as that."""
    count = len(chains.tokens)
    stats, at = Stats(tokens=1 + count), 0
    while at < count:
        left = count - at
        depth = min(policy.allot([None])[0].depth, left if chains.ended else left - 1)  # type: ignore[list-item]
        drafted = 0
        while drafted < depth:
            token, confidence = chains.tokens[at][drafted], chains.confidences[at][drafted]
            drafted += 1
            if token in end_tokens or (policy.needs_confidence and not policy.keep_drafting(confidence)):
                break
        right = sum(chains.right[at][:drafted])
        evaluated = min(right + 1, drafted)
        stats.count(drafted, right, evaluated)
        stats.discarded += max(0, right + 1 - left)
        policy.observe(None, drafted, Verdict(list(range(1, right + 1)), -1, evaluated))  # type: ignore[arg-type]
        at += right + 1
    return stats


class SkippedCount(Counted):
    """Collects the acceptance of a target without sublayers; `agreement`, ranks and overlap are of the first drafted token."""

    def __init__(self, target: Target, skip: Sublayers, draft_length: int) -> None:
        super().__init__(draft_length, target.eos_token_ids)
        self._target, self._skip = target, skip
        self._together = side_by_side()

    def add(self, text: Known) -> None:
        """A text of the target's."""
        count = len(text.tokens) - 1
        if count < 1:
            return

        def compare(places: Tensor, logits: Tensor) -> None:
            own = text.logits[places]
            self.shared += overlap(logits, own).sum().item()
            self._rank(0, likeliest(logits), own.argmax(-1))

        length, together = self.draft_length, self._together
        result = chains(self._target, text, self._skip, length, seen=compare, together=together)
        one = chain_cycles(result.right, self.draft_length, result.ended)
        self.cycles = Stats.total([self.cycles, one])
        self.tokens += count
        first = np.array([right[0] for right in result.right if right])
        self._place(np.arange(1, 1 + len(first)), first)
