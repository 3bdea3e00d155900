"""The tiny model's T5-format tokenizer: whole words of the scenes, letters for everything else."""

from __future__ import annotations

import math
import re
import string
from collections import Counter

from transformers import AddedToken, T5Tokenizer

from ...scenes.grammar import DESCRIBE, caption
from ...scenes.questions import questions
from ...scenes.scene import TRAIN, sample_scene

IMAGE_TOKEN = "<image>"
_SAMPLE = 4000
_FILLERS = "please can you i see in this image picture photo and tell me about it list all short answer question an of"


def build_tokenizer(seed: int = 0) -> T5Tokenizer:
    """Builds the tokenizer from the captions and questions of the first training scenes.

    Unigram with pad 0, end 1, unknown 2, then words, then single characters, then ``<image>``.
    The first words of prompts exist capitalised too.
    """
    words: Counter[str] = Counter(re.findall(r"\w+", DESCRIBE + " " + _FILLERS))
    for index in TRAIN[:_SAMPLE]:
        scene = sample_scene(seed, index)
        words.update(re.findall(r"\w+", caption(scene)))
        for item in questions(scene):
            words.update(re.findall(r"\w+", item.text + " " + item.answer))
    for opener in (DESCRIBE, "what", "how", "is", "where"):
        words[opener.split()[0].capitalize()] += 100
    total = sum(words.values())
    vocabulary: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    for word in sorted(words, key=lambda w: (-words[w], w)):
        vocabulary.append(("▁" + word, math.log(words[word] / total)))
    known = {piece for piece, _ in vocabulary}
    characters = [*string.ascii_letters, *string.digits, *string.punctuation]
    singles = ["▁", *characters, *("▁" + c for c in string.ascii_lowercase)]
    vocabulary += [(piece, -20.0) for piece in singles if piece not in known]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=256)
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, normalized=False, special=True)], special_tokens=True)
    return tokenizer
