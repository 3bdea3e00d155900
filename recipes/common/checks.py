"""Figures of a model on scenes that it does not learn from: short ones for the log, and the parts of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vlmexport.calibration.data.scenes import answer_value, ask, score_told, tell
from vlmexport.calibration.data.scenes.asking import Asked
from vlmexport.calibration.data.scenes.dataset import model_picture
from vlmexport.calibration.data.scenes.reading import check_told_plan
from vlmexport.calibration.data.scenes.scene import sample_scene
from vlmexport.calibration.data.scenes.score import total_accuracy

from .captioner import Captioner, padded
from .drafts import exits, measure_drafts

CHUNK = 64


class Checks:
    """Scenes with their image embeddings and reference texts, and the figures of a model on them.

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
        self.image_embeds = captioner.rows(pictures)
        self.told = [tell(scene) for scene in self.scenes]
        self.ids = captioner.text_ids([t.text for t in self.told])
        self.questions = [ask(scene) for scene in self.scenes] if captioner.asks else []
        self.prompt = captioner.caption_prompt()

    def figures(self) -> dict[str, float]:
        """The short form, rounded, for a log."""
        texts, ids = self.captions()
        bare = exits(self.captioner)
        own = measure_drafts(self.captioner, self.image_embeds, self.prompt, ids, bare)
        result = self.surprise() | {
            "facts": total_accuracy(map(score_told, texts, self.scenes)),
            "facts_of_another_scene": total_accuracy(map(score_told, texts, self.others())),
            "plans": self.plans(texts),
            **({"answers": share(self.answers())} if self.captioner.asks else {}),
            "tokens": float(np.mean([len(row) for row in ids])),
            "cut": float(np.mean([row[-1] != self.captioner.end for row in ids])),
            **{
                f"early_exit_{draft.layer}_alpha": own.drafts[name].acceptance.alpha
                for name, draft in bare.items()
            },
            "greedy_entropy": own.entropy.all,
            "greedy_below_half": own.below_half,
        }
        return {name: round(value, 4) for name, value in result.items()}

    def others(self) -> list:
        """For every place the next scene: what a text scores against it, it scores by luck."""
        return [*self.scenes[1:], self.scenes[0]]

    def captions(self) -> tuple[list[str], list[list[int]]]:
        """Greedy captions as texts and as ids."""
        ids = described(self.captioner, self.image_embeds, self.prompt)
        return self.captioner.say(ids), ids

    def plans(self, texts: Sequence[str]) -> float:
        """Share of captions whose plan is complete and true of their scene."""
        return float(np.mean([check_told_plan(t, s).right for t, s in zip(texts, self.scenes, strict=True)]))

    def surprise(self) -> dict[str, float]:
        """Perplexity per token of the references, the generator's own on the same texts, and their ratio."""
        nats = nats_of(self.captioner, self.image_embeds, self.prompt, self.ids)
        return surprise_of(nats, sum(t.nats for t in self.told), sum(map(len, self.ids)))

    def answers(self) -> dict[str, list[bool]]:
        """By type of question, which answers say the right thing."""
        return answered(self.captioner, self.image_embeds, self.questions, answer_value)


def described(captioner: Captioner, image_embeds: Tensor, prompt: list[int]) -> list[list[int]]:
    """Greedy ids of the answers to one prompt about each of `image_embeds` [N, rows, width]."""
    ids: list[list[int]] = []
    for at in range(0, len(image_embeds), CHUNK):
        part = image_embeds[at : at + CHUNK]
        ids += captioner.speak(part, padded([prompt] * len(part)))
    return ids


@torch.no_grad()
def nats_of(
    captioner: Captioner, image_embeds: Tensor, prompt: list[int], texts: Sequence[list[int]]
) -> float:
    """-log of the probability that the model gives to texts about `image_embeds` [N, rows, width], summed."""
    nats = 0.0
    for at in range(0, len(texts), CHUNK):
        ids = padded(texts[at : at + CHUNK])
        mean = captioner.loss(image_embeds[at : at + CHUNK], padded([prompt] * len(ids)), ids)
        nats += mean.item() * int((ids >= 0).sum())
    return nats


def surprise_of(nats: float, floor: float, tokens: int) -> dict[str, float]:
    """Perplexity per token of a model and of the generator of the texts, and their ratio."""
    return {
        "perplexity": math.exp(nats / tokens),
        "floor": math.exp(floor / tokens),
        "over_floor": math.exp((nats - floor) / tokens),
    }


def answered(
    captioner: Captioner,
    image_embeds: Tensor,
    questions: Sequence[Asked],
    value: Callable[[str, str], str | None],
) -> dict[str, list[bool]]:
    """By type of question, which greedy answers say the right thing; `value` reads one, given the type."""
    right: dict[str, list[bool]] = {}
    for at in range(0, len(questions), CHUNK):
        asked = questions[at : at + CHUNK]
        prompts = padded([captioner.prompt_ids(q.text) for q in asked])
        replies = captioner.say(captioner.speak(image_embeds[at : at + CHUNK], prompts, 16))
        for question, reply in zip(asked, replies, strict=True):
            right.setdefault(question.kind, []).append(value(question.kind, reply) == question.value)
    return right


def share(right: dict[str, list[bool]]) -> float:
    """Share of the answers that say the right thing, over all types of question."""
    return float(np.mean([value for values in right.values() for value in values]))


def by_type(right: dict[str, list[bool]]) -> dict[str, float]:
    """Share of the answers to each type of question that say the right thing."""
    return {kind: round(share({kind: values}), 4) for kind, values in sorted(right.items())}
