"""The GPT-2 side of the tokenizer: the whole words of the captions, and one token that starts, ends and pads."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from ..common.words import unigram, words_of_captions

END = "<|endoftext|>"
UNKNOWN = "<unk>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram with unknown 0, then words, then single characters, and ``<|endoftext|>`` last, as in GPT-2.

    It adds nothing to a text: as in GPT-2, who needs the start or the end of a text writes it.
    """
    core = unigram(words_of_captions(), UNKNOWN)
    core.add_special_tokens([END])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        model_max_length=512,
    )
