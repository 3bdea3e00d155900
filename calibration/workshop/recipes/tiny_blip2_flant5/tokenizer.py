"""The T5-format tokenizer: the whole words of the scenes, letters for everything else."""

from __future__ import annotations

import math
import re
import string

from transformers import AddedToken, T5Tokenizer

from ...scenes.asking import every_text
from ...scenes.vocabulary import COLOURS
from ...scenes.words import KIND_REASONS, NUMBERS, SLOTS
from .prompts import PROMPTS

IMAGE_TOKEN = "<image>"
_FILLERS = "an only it is left right please can you i see in this image photo and tell me about list all short answer of"


def words_of_the_world() -> list[str]:
    """Every word of captions, questions, answers and prompts, in alphabetical order."""
    texts = [_FILLERS, *COLOURS, *NUMBERS.values(), *KIND_REASONS.values(), *PROMPTS, *every_text()]
    texts += [option for options in SLOTS.values() for option in options]
    plain = {word for text in texts for word in re.findall(r"[a-z]+", re.sub(r"{\w+}", " ", text.lower()))}
    openers = {text.split()[0].capitalize() for text in (*PROMPTS, *every_text()) if text and text[0] != "{"}
    return sorted(plain) + sorted(openers - plain)


def build_tokenizer() -> T5Tokenizer:
    """Unigram with pad 0, end 1, unknown 2, then words, then single characters, then ``<image>``."""
    words = words_of_the_world()
    vocabulary: list[tuple[str, float]] = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary += [("▁" + word, -math.log(len(words))) for word in words]
    known = {piece for piece, _ in vocabulary}
    characters = [*string.ascii_letters, *string.digits, *string.punctuation]
    singles = ["▁", *characters, *("▁" + c for c in string.ascii_lowercase)]
    vocabulary += [(piece, -20.0) for piece in singles if piece not in known]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, normalized=False, special=True)], special_tokens=True)
    return tokenizer
