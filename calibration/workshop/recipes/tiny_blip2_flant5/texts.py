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
_LONGEST_CAPTION, _LONGEST_QUESTION, _LONGEST_ANSWER = 84, 16, 8


def text_table(
    path: Path, seed: int, indices: range, tokenizer: PreTrainedTokenizerBase
) -> dict[str, np.ndarray]:
    """Token ids of captions and some questions of many scenes, cached in ``path``.

    Rows ``len(indices)`` onwards belong to the mirrored pictures.

    Returns:
        ``caption`` (2N, 84), ``question`` (2N, 4, 16), ``answer`` (2N, 4, 8), all int64 and
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
            "caption": _ids(captions, _LONGEST_CAPTION, tokenizer),
            "question": _ids(openers, _LONGEST_QUESTION, tokenizer).reshape(shape),
            "answer": _ids([q.answer for q in asked], _LONGEST_ANSWER, tokenizer).reshape(shape),
            "count": np.array([len(s.objects) for s in scenes], np.int16),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, **table)  # type: ignore[arg-type]
        partial.replace(path)
    with np.load(path) as stored:
        return {name: stored[name].astype(np.int64) for name in stored.files}


def _ids(texts: list[str], longest: int, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    rows = np.zeros((len(texts), longest), np.int16)
    for row, ids in zip(rows, tokenizer(texts)["input_ids"], strict=True):
        if len(ids) > longest:
            raise ValueError(f"a text has {len(ids)} tokens, at most {longest} fit")
        row[: len(ids)] = ids
    return rows
