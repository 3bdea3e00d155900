"""The Qwen2 side of the tokenizer: the marks of its chat template around the whole words of scenes, films and pairs."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from vlmexport.calibration.data.scenes.film_asking import every_film_text
from vlmexport.calibration.data.scenes.film_story import DESCRIBE_FILM
from vlmexport.calibration.data.scenes.film_words import FILM_QUESTIONS
from vlmexport.calibration.data.scenes.pair import PAIR_QUESTIONS, every_pair_text

from ..common.prompts import PROMPTS
from ..common.words import unigram, words_of_the_world

END, PAD, UNKNOWN = "<|im_end|>", "<|endoftext|>", "<unk>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
MARKS = (PAD, "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO)
FILM_PROMPTS = (DESCRIBE_FILM, "what happens?", "describe the video", "what happens in the video?")
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As the published Qwen2.5-VL has it: pictures and videos where they stand in a message."""
_FILLERS = (
    "an only it is left right please can you i see in this image photo video picture pictures and tell me about list all "
    "short answer of system user assistant you are a helpful"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram with unknown 0, then words, then single characters, then the marks. It adds nothing to a text."""
    asked = [text for table in (FILM_QUESTIONS, PAIR_QUESTIONS) for forms in table.values() for text in forms]
    told = " ".join([_FILLERS, *every_film_text(), *every_pair_text()])
    prompts = [*PROMPTS, *FILM_PROMPTS, *asked, "you"]  # their first words are known capitalised, too
    core = unigram(words_of_the_world(prompts, told), UNKNOWN)
    core.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, unk_token=UNKNOWN, model_max_length=2048
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
