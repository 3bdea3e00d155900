"""The T5-format tokenizer: the whole words of the scenes, letters for everything else."""

from __future__ import annotations

from transformers import AddedToken, T5Tokenizer

from ..common.prompts import PROMPTS
from ..common.words import pieces, words_of_the_world

IMAGE_TOKEN = "<image>"
_FILLERS = "an only it is left right please can you i see in this image photo and tell me about list all short answer of"


def build_tokenizer() -> T5Tokenizer:
    """Unigram with pad 0, end 1, unknown 2, then words, then single characters, then ``<image>``."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocabulary = [*special, *pieces(words_of_the_world(PROMPTS, _FILLERS))]
    tokenizer = T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512)
    tokenizer.add_tokens([AddedToken(IMAGE_TOKEN, normalized=False, special=True)], special_tokens=True)
    return tokenizer
