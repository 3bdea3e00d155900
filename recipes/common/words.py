"""The words of the scenes, and the vocabulary of a Unigram tokenizer that has each of them as one token."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from vlmexport.calibration.data.scenes.asking import every_text
from vlmexport.calibration.data.scenes.vocabulary import COLOURS, LIGHTS
from vlmexport.calibration.data.scenes.words import KIND_REASONS, NUMBERS, SLOTS

STEM = "\u2581"  # begins a word


def words_of_captions() -> list[str]:
    """Every word that a caption may have, in alphabetical order."""
    texts = [*COLOURS, *LIGHTS, *NUMBERS.values(), *KIND_REASONS.values(), "an"]
    texts += [option for options in SLOTS.values() for option in options]
    return sorted(_plain(texts))


def words_of_the_world(prompts: Sequence[str], fillers: str) -> list[str]:
    """Every word of captions, questions, answers and prompts, in alphabetical order, then capitalised openers."""
    texts = [fillers, *prompts, *every_text()]
    plain = {*words_of_captions(), *_plain(texts)}
    openers = {text.split()[0].capitalize() for text in (*prompts, *every_text()) if text and text[0] != "{"}
    return sorted(plain) + sorted(openers - plain)


def pieces(words: Sequence[str]) -> list[tuple[str, float]]:
    """Pieces with their log probabilities: the words, then single characters for everything else."""
    vocabulary = [(STEM + word, -math.log(len(words))) for word in words]
    known = {piece for piece, _ in vocabulary}
    characters = [*string.ascii_letters, *string.digits, *string.punctuation]
    singles = [STEM, *characters, *(STEM + c for c in string.ascii_lowercase)]
    return vocabulary + [(piece, -20.0) for piece in singles if piece not in known]


def unigram(words: Sequence[str], unknown: str) -> Tokenizer:
    """A tokenizer with `unknown` as 0, then `pieces`; it adds nothing to a text, and white space only parts words."""
    core = Tokenizer(models.Unigram([(unknown, 0.0), *pieces(words)], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always", split=True)]
    )
    core.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    return core


def _plain(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"[a-z]+", re.sub(r"{\w+}", " ", text.lower()))}
