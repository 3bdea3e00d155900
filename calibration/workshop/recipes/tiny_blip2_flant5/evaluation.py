"""What a model says about scenes, against what is in them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import Blip2ForConditionalGeneration, PreTrainedTokenizerBase

from ...scenes.dataset import model_picture
from ...scenes.grammar import DESCRIBE, caption
from ...scenes.questions import questions
from ...scenes.scene import sample_scene
from ...scenes.score import score, total_accuracy
from .model import MEAN, SIDE, STD

CHUNK = 100


def _pixels(pictures: np.ndarray) -> Tensor:
    x = torch.tensor(pictures).permute(0, 3, 1, 2).float() / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


@torch.no_grad()
def generate(
    model: Blip2ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    pictures: np.ndarray,
    prompts: Sequence[str],
    max_new_tokens: int = 96,
) -> list[list[int]]:
    """Greedy token ids, without the start token and cut after </s>.

    Args:
        model: the model. tokenizer: its tokenizer.
        pictures: uint8 (B, 96, 96, 3), already resized.
        prompts: one per picture. max_new_tokens: the limit per picture.
    """
    count = model.query_tokens.shape[1]
    image = [model.config.image_token_index] * count
    ids = [image + tokenizer(p)["input_ids"] for p in prompts]
    width = max(map(len, ids))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    output = model.generate(
        pixel_values=_pixels(pictures),
        input_ids=padded,  # pyright: ignore[reportArgumentType]
        attention_mask=(padded != 0).long(),  # pyright: ignore[reportArgumentType]
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        decoder_start_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    result = []
    for row in output[:, 1:].tolist():
        result.append(row[: row.index(1) + 1] if 1 in row else row)
    return result


def evaluate_scenes(
    model: Blip2ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    indices: Sequence[int],
    grey: bool = False,
) -> dict[str, float]:
    """Greedy captions and answers on scenes, as accuracies; ``grey`` hides the pictures."""
    model.eval()
    scores, unseen_scenes, told, truth = [], [], [], []
    answers: dict[str, list[bool]] = {}
    for start in range(0, len(indices), CHUNK):
        scenes = [sample_scene(seed, i) for i in indices[start : start + CHUNK]]
        pictures = np.stack([model_picture(seed, s.index, SIDE) for s in scenes])
        if grey:
            pictures[:] = 128
        ids = generate(model, tokenizer, pictures, [DESCRIBE] * len(scenes))
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for scene, text, found in zip(scenes, texts, ids, strict=True):
            scores.append(score(text, scene))
            unseen_scenes.append(bool(scene.unseen))
            told.append(found)
            truth.append(tokenizer(caption(scene))["input_ids"])
        rng = np.random.default_rng([seed, start, 17])
        asked = [options[int(rng.integers(len(options)))] for options in map(questions, scenes)]
        replies = tokenizer.batch_decode(
            generate(model, tokenizer, pictures, [q.text for q in asked], 12), skip_special_tokens=True
        )
        for question, reply in zip(asked, replies, strict=True):
            answers.setdefault(question.kind, []).append(reply.strip() == question.answer)
    flags = np.array(unseen_scenes)
    every = [right for values in answers.values() for right in values]
    result = {
        "facts": total_accuracy(scores),
        **{
            t: total_accuracy(scores, t)
            for t in ("object", "colour", "relation", "size", "pattern", "setting")
        },
        "exact": float(np.mean([a == b for a, b in zip(told, truth, strict=True)])),
        "bleu4": bleu4(told, truth),
        "answers": float(np.mean(every)),
    }
    if flags.any():
        result["facts_scenes_with_unseen"] = total_accuracy(
            [s for s, f in zip(scores, flags, strict=True) if f]
        )
        result["facts_scenes_without_unseen"] = total_accuracy(
            [s for s, f in zip(scores, flags, strict=True) if not f]
        )
        result["unseen_objects"] = total_accuracy(scores, "unseen")
    return {name: round(value, 4) for name, value in result.items()}


@torch.no_grad()
def picture_perplexity(
    model: Blip2ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    indices: Sequence[int],
) -> float:
    """Perplexity per token of the reference captions, given the picture."""
    model.eval()
    image = [model.config.image_token_index] * model.query_tokens.shape[1]
    prompt = torch.tensor([image + tokenizer(DESCRIBE)["input_ids"]])
    nats, tokens = 0.0, 0
    for start in range(0, len(indices), CHUNK):
        chunk = indices[start : start + CHUNK]
        pictures = np.stack([model_picture(seed, i, SIDE) for i in chunk])
        texts = tokenizer([caption(sample_scene(seed, i)) for i in chunk], padding=True, return_tensors="pt")
        labels = texts["input_ids"].masked_fill(texts["input_ids"] == 0, -100)
        ids = prompt.expand(len(chunk), -1)
        loss = model(
            pixel_values=_pixels(pictures), input_ids=ids, attention_mask=ids.ne(0), labels=labels
        ).loss
        count = int(labels.ne(-100).sum())
        nats, tokens = nats + loss.item() * count, tokens + count
    return math.exp(nats / tokens)


def bleu4(found: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> float:
    """Corpus BLEU-4 over token ids with one reference each."""
    logs, found_length, true_length = 0.0, sum(map(len, found)), sum(map(len, truth))
    for n in range(1, 5):
        same = total = 0
        for a, b in zip(found, truth, strict=True):
            grams, reference = _grams(a, n), _grams(b, n)
            same += (grams & reference).total()
            total += grams.total()
        if not same:
            return 0.0
        logs += math.log(same / total) / 4
    return math.exp(logs) * min(1.0, math.exp(1 - true_length / max(1, found_length)))


def _grams(ids: Sequence[int], n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))
