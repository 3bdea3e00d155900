"""What an early exit would get right of a model's own greedy captions: over all, by position, by part of the text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....evaluation.acceptance import Acceptance, Count
from ....targets.target import Rows
from ....training.losses import agreement
from ...scenes.parts import PARTS, parts_of
from .captioner import Captioner, padded
from .words import STEM

DRAFT_LENGTH = 5
LOGITS = 800_000  # of one token each of the texts that are measured together
STEMS = f"{STEM}Ġ"
"""What begins a word in a Unigram tokenizer and in a byte-level BPE."""


@dataclass
class Early:
    """Acceptance by layer, and how sure the model itself is of these texts."""

    layers: dict[int, Acceptance]
    agreement_by_part: dict[int, dict[str, float]]
    share_of_part: dict[str, float]  # of the tokens
    entropy: dict[str, float]  # nats per token of the full model: "all" and by part
    below_half: float  # share of tokens whose probability is below 0.5

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        layers = {
            str(n): found.to_dict() | {"agreement_by_part": self.agreement_by_part[n]}
            for n, found in self.layers.items()
        }
        return {
            "layers": layers,
            "share_of_part": self.share_of_part,
            "entropy": self.entropy,
            "below_half": self.below_half,
        }


@torch.no_grad()
def measure_early(
    captioner: Captioner,
    rows: Tensor,
    prompt: list[int],
    texts: list[list[int]],
    layers: Sequence[int] | None = None,
) -> Early:
    """Teacher-forced on the model's own greedy texts, which is what chain drafting meets there.

    Args:
        rows: of the pictures [N, rows, width]. prompt: ids of the prompt that was answered.
        texts: N lists of ids with the end token. layers: a quarter and a half of the decoder unless given.
    """
    # Logits of every layer lie side by side: of a large vocabulary, those of few texts.
    chunk = max(1, min(64, LOGITS // len(captioner.tokenizer)))
    exits = captioner.early if layers is None else tuple(layers)
    counts = {layer: Count(DRAFT_LENGTH, [captioner.end]) for layer in exits}
    hits: dict[int, dict[str, list[Tensor]]] = {n: defaultdict(list) for n in exits}
    entropies: dict[str, list[Tensor]] = defaultdict(list)
    top: list[Tensor] = []
    for at in range(0, len(texts), chunk):
        own = texts[at : at + chunk]
        ids = padded(own)
        *drafted, final = captioner.layer_logits(
            rows[at : at + chunk], padded([prompt] * len(own)), ids, [*exits, len(captioner.layers)]
        )
        lengths = torch.tensor([len(text) for text in own])[:, None]  # a raw model may say the pad token too
        places = torch.arange(ids.shape[1])
        where = (places < lengths) & (places > 0)  # prefill emits the first token
        record, position = where.nonzero(as_tuple=True)
        none = torch.zeros(len(record), 0)
        known = Rows(none, none, ids[where], record, position)
        part = torch.tensor([PARTS.index(p) for text in own for p in token_parts(captioner, text)[1:]])
        chances = final[where].float().softmax(-1)
        entropy = torch.special.entr(chances).sum(-1)
        top.append(chances.max(-1).values)
        for number, name in enumerate(PARTS):
            entropies[name].append(entropy[part == number])
        for layer, found in zip(exits, drafted, strict=True):
            counts[layer].add(found[where], final[where], known)
            matches = agreement(found[where], final[where]).float()
            for number, name in enumerate(PARTS):
                hits[layer][name].append(matches[part == number])
    total = sum(len(value) for values in entropies.values() for value in values)
    return Early(
        layers={n: count.result() for n, count in counts.items()},
        agreement_by_part={n: {name: _mean(values) for name, values in hits[n].items()} for n in exits},
        share_of_part={name: sum(map(len, values)) / total for name, values in entropies.items()},
        entropy={"all": _mean([v for values in entropies.values() for v in values])}
        | {name: _mean(values) for name, values in entropies.items()},
        below_half=_mean([(value < 0.5).float() for value in top]),
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
    found = [parts[word] for word in word_of]
    return found + [found[-1] if found else "style"] * ended


def _mean(values: list[Tensor]) -> float:
    every = torch.cat(values)
    return round(every.mean().item(), 4) if len(every) else 0.0
