"""Short figures for the log of a training, on scenes that it does not learn from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Blip2ForConditionalGeneration, PreTrainedTokenizerBase

from .....evaluation.acceptance import Count
from .....targets.target import Rows
from ....scenes.authored import answer_value, ask, score_told, tell
from ....scenes.authored.reading import check_told_plan
from ....scenes.dataset import model_picture
from ....scenes.grammar import DESCRIBE
from ....scenes.scene import sample_scene
from ....scenes.score import total_accuracy
from ..model import DECODER_LAYERS, SIDE
from .batches import padded
from .language import cross_entropy, layer_logits, logits, speak
from .rows import picture_rows

EARLY = (DECODER_LAYERS // 4, DECODER_LAYERS // 2)
CHUNK = 64


class Checks:
    """Scenes with their rows and reference texts, and the figures of a model on them."""

    def __init__(
        self,
        model: Blip2ForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        indices: Sequence[int],
    ) -> None:
        self.tokenizer = tokenizer
        self.scenes = [sample_scene(seed, i) for i in indices]
        pictures = np.stack([model_picture(seed, i, SIDE) for i in indices])
        self.rows = torch.from_numpy(picture_rows(model, pictures))
        self.told = [tell(scene) for scene in self.scenes]
        self.ids = tokenizer([t.text for t in self.told])["input_ids"]
        self.questions = [ask(scene) for scene in self.scenes]

    def prompts(self, count: int) -> Tensor:
        """The caption prompt, so many times."""
        return padded(self.tokenizer([DESCRIBE] * count)["input_ids"])

    def figures(self, model: Blip2ForConditionalGeneration) -> dict[str, float]:
        """Everything below, rounded."""
        texts, ids = self.captions(model)
        apart = [*self.scenes[1:], self.scenes[0]]
        result = self.surprise(model) | {
            "facts": total_accuracy(map(score_told, texts, self.scenes)),
            "facts_of_another_scene": total_accuracy(map(score_told, texts, apart)),
            "plans": float(
                np.mean([check_told_plan(t, s).right for t, s in zip(texts, self.scenes, strict=True)])
            ),
            "answers": self.answers(model),
            "tokens": float(np.mean([len(row) for row in ids])),
            "cut": float(np.mean([row[-1] != 1 for row in ids])),
        }
        result |= self.early(model, ids)
        return {name: round(value, 4) for name, value in result.items()}

    def captions(self, model: Blip2ForConditionalGeneration) -> tuple[list[str], list[list[int]]]:
        """Greedy captions as texts and as ids."""
        ids: list[list[int]] = []
        for part in self._parts():
            ids += speak(model, self.rows[part], self.prompts(len(self.rows[part])))
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True), ids

    @torch.no_grad()
    def surprise(self, model: Blip2ForConditionalGeneration) -> dict[str, float]:
        """Perplexity per token of the references, the generator's own on the same texts, and their ratio."""
        nats, tokens = 0.0, sum(map(len, self.ids))
        for part in self._parts():
            ids = padded(self.ids[part])
            found = logits(model, self.rows[part], self.prompts(len(ids)), ids)
            nats += cross_entropy(found, ids).item() * int((ids != 0).sum())
        floor = sum(t.nats for t in self.told) / tokens
        return {
            "perplexity": math.exp(nats / tokens),
            "floor": math.exp(floor),
            "over_floor": math.exp(nats / tokens - floor),
        }

    def answers(self, model: Blip2ForConditionalGeneration) -> float:
        """Share of right answers, judged by what they say."""
        right = []
        for part in self._parts():
            asked = self.questions[part]
            ids = speak(
                model, self.rows[part], padded(self.tokenizer([q.text for q in asked])["input_ids"]), 16
            )
            replies = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            right += [answer_value(q.kind, r) == q.value for q, r in zip(asked, replies, strict=True)]
        return float(np.mean(right))

    @torch.no_grad()
    def early(self, model: Blip2ForConditionalGeneration, texts: list[list[int]]) -> dict[str, float]:
        """Acceptance of early exits on the model's own greedy captions, and how sure the model is there."""
        counts = {layer: Count(5, [1]) for layer in EARLY}
        entropy, top = [], []
        for part in self._parts():
            ids = padded(texts[part])
            *drafted, final = layer_logits(
                model, self.rows[part], self.prompts(len(ids)), ids, [*EARLY, DECODER_LAYERS]
            )
            where = ids != 0
            where[:, 0] = False  # prefill emits the first token
            record, position = where.nonzero(as_tuple=True)
            none = torch.zeros(len(record), 0)
            rows = Rows(none, none, ids[where], record, position)
            for layer, found in zip(EARLY, drafted, strict=True):
                counts[layer].add(found[where], final[where], rows)
            chances = F.softmax(final[where].float(), -1)
            entropy.append(torch.special.entr(chances).sum(-1))
            top.append(chances.max(-1).values)
        result = {f"early_exit_{n}_alpha": count.result().alpha for n, count in counts.items()}
        return result | {
            "greedy_entropy": torch.cat(entropy).mean().item(),
            "greedy_below_half": (torch.cat(top) < 0.5).float().mean().item(),
        }

    def _parts(self) -> list[slice]:
        return [slice(at, at + CHUNK) for at in range(0, len(self.scenes), CHUNK)]
