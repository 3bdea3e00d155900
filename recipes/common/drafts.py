"""What drafts on a model's first layers get right of its own greedy captions: over all, by position, by part of the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from vlmexport.calibration.data.scenes.parts import PARTS, parts_of
from vlmexport.calibration.evaluation.acceptance import Acceptance, Count
from vlmexport.calibration.objectives.losses import agreement
from vlmexport.calibration.targets.teacher_forcing import Rows
from vlmexport.exporter.drafts.common.base import SelfDraft
from vlmexport.exporter.drafts.early_exit import EarlyExit

from .captioner import Captioner, padded
from .words import STEM

DRAFT_LENGTH = 5
LOGITS = 800_000  # of one token each of the texts that are measured together
STEMS = f"{STEM}Ġ"
"""What begins a word in a Unigram tokenizer and in a byte-level BPE."""
SPANS = {"1-9": range(1, 10), "10-29": range(10, 30), "30-59": range(30, 60), "60-": range(60, 1 << 20)}
"""Of the places of tokens in their text; that at 0 comes from the prefill, and nothing drafts it."""


@dataclass(frozen=True)
class Means:
    """A figure of tokens on average: of all, of each part of the text, of each span of places."""

    all: float
    by_part: dict[str, float]
    by_span: dict[str, float]


@dataclass(frozen=True)
class Drafted:
    """What one draft proposes."""

    acceptance: Acceptance
    agreement: Means  # share of tokens that are the target's
    entropy: Means  # nats per token of the draft's own distribution

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        by = {f"agreement_{name}": getattr(self.agreement, name) for name in ("by_part", "by_span")}
        return {**self.acceptance.to_dict(), **by, "entropy": asdict(self.entropy)}


@dataclass(frozen=True)
class OwnCaptions:
    """Drafts by name, and how sure the model itself is of these texts."""

    drafts: dict[str, Drafted]
    entropy: Means  # nats per token of the full model
    share_by_part: dict[str, float]  # of the tokens
    share_by_span: dict[str, float]
    below_half: float  # share of tokens whose probability is below 0.5


def exits(captioner: Captioner) -> dict[str, SelfDraft]:
    """The bare exits after a quarter and a half of the decoder, by name."""
    return {draft.name: draft for draft in map(EarlyExit, captioner.early)}


@torch.no_grad()
def measure_drafts(
    captioner: Captioner,
    image_embeds: Tensor,
    prompt: list[int],
    texts: list[list[int]],
    drafts: Mapping[str, SelfDraft],
) -> OwnCaptions:
    """Teacher-forced on the model's own greedy texts, which is what chain drafting meets there.

    Args:
        image_embeds: of the pictures [N, rows, width]. prompt: ids of the prompt that was answered.
        texts: N lists of ids with the end token. drafts: those that look at each row by itself, by name; their networks are
            moved to where the captioner computes.
    """
    # Logits of a draft lie beside the model's: of a large vocabulary, those of few texts.
    chunk = max(1, min(64, LOGITS // len(captioner.tokenizer)))
    networks = {name: draft.network.to(captioner.device).eval() for name, draft in drafts.items()}
    layers = sorted({draft.layer for draft in drafts.values()} | {len(captioner.layers)})
    counts = {name: Count(DRAFT_LENGTH, [captioner.end]) for name in drafts}
    parts: list[Tensor] = []
    places: list[Tensor] = []
    top: list[Tensor] = []
    entropies: list[Tensor] = []
    matches: dict[str, list[Tensor]] = {name: [] for name in drafts}
    draft_entropies: dict[str, list[Tensor]] = {name: [] for name in drafts}
    for at in range(0, len(texts), chunk):
        own = texts[at : at + chunk]
        ids = padded(own)
        hidden_states = captioner.layer_rows(
            image_embeds[at : at + chunk], padded([prompt] * len(own)), ids, layers
        )
        lengths = torch.tensor([len(text) for text in own])[:, None]  # a raw model may say the pad token too
        index = torch.arange(ids.shape[1])
        where = (index < lengths) & (index > 0)  # prefill emits the first token
        record, position = where.nonzero(as_tuple=True)
        none = torch.zeros(len(record), 0)
        known = Rows(none, none, ids[where], record, position)
        parts.append(torch.tensor([PARTS.index(p) for text in own for p in token_parts(captioner, text)[1:]]))
        places.append(position)
        final = captioner.head(hidden_states[layers[-1]])[where]
        chances = final.float().softmax(-1)
        top.append(chances.max(-1).values)
        entropies.append(torch.special.entr(chances).sum(-1))
        for name, draft in drafts.items():
            logits = captioner.head(networks[name](hidden_states[draft.layer]))[where]
            counts[name].add(logits, final, known)
            matches[name].append(agreement(logits, final).float())
            draft_entropies[name].append(torch.special.entr(logits.float().softmax(-1)).sum(-1))
    groups = _groups(torch.cat(parts), torch.cat(places))
    share = {kind: {name: _mean(each.float()) for name, each in one.items()} for kind, one in groups.items()}
    return OwnCaptions(
        {
            name: Drafted(
                counts[name].result(),
                _means(torch.cat(matches[name]), groups),
                _means(torch.cat(draft_entropies[name]), groups),
            )
            for name in drafts
        },
        _means(torch.cat(entropies), groups),
        share["by_part"],
        share["by_span"],
        _mean((torch.cat(top) < 0.5).float()),
    )


def token_parts(captioner: Captioner, ids: list[int]) -> list[str]:
    """The part of the text that each token belongs to; the end token counts to the part before it, and a word's further tokens
    to that of the word."""
    ended = ids[-1] == captioner.end
    tokens = captioner.tokenizer.convert_ids_to_tokens(ids[: len(ids) - ended])
    words: list[str] = []
    word_of: list[int] = []
    for token in tokens:
        bare = token.lstrip(STEMS)
        if words and bare == token and token.isalpha() and (words[-1].isalpha() or not words[-1]):
            words[-1] += token
        else:
            words.append(bare)
        word_of.append(len(words) - 1)
    parts = parts_of(words)
    by_token = [parts[word] for word in word_of]
    return by_token + [by_token[-1] if by_token else "style"] * ended


def _groups(parts: Tensor, places: Tensor) -> dict[str, dict[str, Tensor]]:
    """Which tokens, bool [N], are of each part and of each span."""
    return {
        "by_part": {name: parts == number for number, name in enumerate(PARTS)},
        "by_span": {name: (places >= r.start) & (places < r.stop) for name, r in SPANS.items()},
    }


def _means(values: Tensor, groups: Mapping[str, Mapping[str, Tensor]]) -> Means:
    by = {kind: {name: _mean(values[each]) for name, each in one.items()} for kind, one in groups.items()}
    return Means(_mean(values), **by)


def _mean(values: Tensor) -> float:
    return round(values.mean().item(), 4) if len(values) else 0.0
