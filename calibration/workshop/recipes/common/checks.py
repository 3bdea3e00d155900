"""Figures of a model on scenes that it does not learn from: short ones for the log, and the parts of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ...scenes import answer_value, ask, score_told, tell
from ...scenes.dataset import model_picture
from ...scenes.reading import check_told_plan
from ...scenes.scene import sample_scene
from ...scenes.score import total_accuracy
from .captioner import Captioner, cross_entropy, padded
from .early import measure_early

CHUNK = 64


class Checks:
    """Scenes with their rows and reference texts, and the figures of a model on them.

    Args:
        captioner: encodes the pictures, once, and is asked. seed, indices: which scenes.
        grey: the pictures are grey all over; scenes and texts are as they were.
    """

    def __init__(
        self,
        captioner: Captioner,
        seed: int,
        indices: Sequence[int],
        grey: bool = False,
    ) -> None:
        self.captioner = captioner
        side = captioner.side
        self.scenes = [sample_scene(seed, i) for i in indices]
        blank = np.full((side, side, 3), 128, np.uint8)
        pictures = np.stack([blank if grey else model_picture(seed, i, side) for i in indices])
        self.rows = captioner.rows(pictures)
        self.told = [tell(scene) for scene in self.scenes]
        self.ids = captioner.text_ids([t.text for t in self.told])
        self.questions = [ask(scene) for scene in self.scenes] if captioner.asks else []
        self.prompt = captioner.caption_prompt()

    def figures(self) -> dict[str, float]:
        """The short form, rounded, for a log."""
        texts, ids = self.captions()
        early = measure_early(self.captioner, self.rows, self.prompt, ids)
        result = self.surprise() | {
            "facts": total_accuracy(map(score_told, texts, self.scenes)),
            "facts_of_another_scene": total_accuracy(map(score_told, texts, self.others())),
            "plans": self.plans(texts),
            **({"answers": share(self.answers())} if self.captioner.asks else {}),
            "tokens": float(np.mean([len(row) for row in ids])),
            "cut": float(np.mean([row[-1] != self.captioner.end for row in ids])),
            **{f"early_exit_{n}_alpha": found.alpha for n, found in early.layers.items()},
            "greedy_entropy": early.entropy["all"],
            "greedy_below_half": early.below_half,
        }
        return {name: round(value, 4) for name, value in result.items()}

    def others(self) -> list:
        """For every place the next scene: what a text scores against it, it scores by luck."""
        return [*self.scenes[1:], self.scenes[0]]

    def captions(self) -> tuple[list[str], list[list[int]]]:
        """Greedy captions as texts and as ids."""
        ids: list[list[int]] = []
        for part in self._parts():
            rows = self.rows[part]
            ids += self.captioner.speak(rows, padded([self.prompt] * len(rows)))
        return self.captioner.say(ids), ids

    def plans(self, texts: Sequence[str]) -> float:
        """Share of captions whose plan is complete and true of their scene."""
        return float(np.mean([check_told_plan(t, s).right for t, s in zip(texts, self.scenes, strict=True)]))

    @torch.no_grad()
    def surprise(self) -> dict[str, float]:
        """Perplexity per token of the references, the generator's own on the same texts, and their ratio."""
        nats, tokens = 0.0, sum(map(len, self.ids))
        for part in self._parts():
            ids = padded(self.ids[part])
            found = self.captioner.logits(self.rows[part], padded([self.prompt] * len(ids)), ids)
            nats += cross_entropy(found, ids).item() * int((ids >= 0).sum())
        floor = sum(t.nats for t in self.told) / tokens
        return {
            "perplexity": math.exp(nats / tokens),
            "floor": math.exp(floor),
            "over_floor": math.exp(nats / tokens - floor),
        }

    def answers(self) -> dict[str, list[bool]]:
        """By type of question, which answers say the right thing."""
        right: dict[str, list[bool]] = {}
        for part in self._parts():
            asked = self.questions[part]
            prompts = padded([self.captioner.prompt_ids(q.text) for q in asked])
            replies = self.captioner.say(self.captioner.speak(self.rows[part], prompts, 16))
            for question, reply in zip(asked, replies, strict=True):
                right.setdefault(question.kind, []).append(
                    answer_value(question.kind, reply) == question.value
                )
        return right

    def _parts(self) -> list[slice]:
        return [slice(at, at + CHUNK) for at in range(0, len(self.scenes), CHUNK)]


def share(right: dict[str, list[bool]]) -> float:
    """Share of the answers that say the right thing, over all types of question."""
    return float(np.mean([value for values in right.values() for value in values]))
