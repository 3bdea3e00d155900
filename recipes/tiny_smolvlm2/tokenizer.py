"""The SmolVLM2 side of the tokenizer: the marks of its chat template and of tiles around the whole words of scenes."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ..common.prompts import PROMPTS
from ..common.words import unigram, words_of_the_world

START, PAD, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<end_of_utterance>", "<unk>"
AROUND, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
MOST_ACROSS = 3  # tiles of a picture, down and across
MARKS = (
    START,
    PAD,
    GLOBAL,
    *(
        f"<row_{row}_col_{column}>"
        for row in range(1, MOST_ACROSS + 1)
        for column in range(1, MOST_ACROSS + 1)
    ),
    AROUND,
    IMAGE,
    END,
)
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As the published SmolVLM2 has it: pictures where they stand, and no branch for videos."""
_FILLERS = "an only it is left right please can you i see in this image photo picture and tell me about list all short answer of"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram with unknown 0, then words, then single characters, then the marks. It adds nothing to a text."""
    core = unigram(words_of_the_world([*PROMPTS, "user", "assistant", "system"], _FILLERS), UNKNOWN)
    core.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=2048,
        extra_special_tokens={
            "fake_image_token": AROUND,
            "global_image_token": GLOBAL,
            "image_token": IMAGE,
            "end_of_utterance_token": END,
        },
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
