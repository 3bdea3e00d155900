"""Prompts and targets of the decoder stage as token ids, one compact cached table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...scenes.grammar import DESCRIBE, caption
from ...scenes.questions import questions
from ...scenes.scene import mirror, sample_scene

PROMPTS = (
    DESCRIBE,
    "Describe the scene",
    "describe the scene.",
    "Describe the scene.",
    "please describe the scene",
    "describe the picture",
    "Describe the image.",
    "what do you see?",
    "What is on the table?",
    "",
)
ASKED = 4  # questions kept per picture


def text_table(
    path: Path, seed: int, indices: range, tokenizer: PreTrainedTokenizerBase
) -> dict[str, np.ndarray]:
    """Token ids of captions and some questions of many scenes, cached in ``path``.

    Rows ``len(indices)`` onwards belong to the mirrored pictures.

    Returns:
        ``caption`` (2N, c), ``question`` (2N, 4, q), ``answer`` (2N, 4, a), all int64, as wide as the longest and
        ending in </s>, padded with 0, and ``count`` (2N,), the number of objects.
    """
    if not path.exists():
        scenes = [sample_scene(seed, i) for i in indices]
        scenes += [mirror(s) for s in scenes]
        captions = [caption(s) for s in scenes]
        rng = np.random.default_rng([seed, 11])
        asked = []
        for scene in scenes:
            options = questions(scene)
            asked += [options[i] for i in rng.choice(len(options), ASKED, replace=False)]
        openers = [q.text if rng.random() < 0.7 else q.text.capitalize() for q in asked]
        shape = (len(scenes), ASKED, -1)
        table = {
            "caption": _ids(captions, tokenizer),
            "question": _ids(openers, tokenizer).reshape(shape),
            "answer": _ids([q.answer for q in asked], tokenizer).reshape(shape),
            "count": np.array([len(s.objects) for s in scenes], np.int16),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **table)  # type: ignore[arg-type]
        partial.replace(path)
    with np.load(path) as stored:
        return {name: stored[name].astype(np.int64) for name in stored.files}


def _ids(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    found = tokenizer(texts)["input_ids"]
    rows = np.zeros((len(texts), max(map(len, found))), np.int16)
    for row, ids in zip(rows, found, strict=True):
        row[: len(ids)] = ids
    return rows
