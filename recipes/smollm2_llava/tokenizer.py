"""SmolLM2's tokenizer with a mark for pictures, and its chat template with a place for them."""

from __future__ import annotations

from pathlib import Path

from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerFast

IMAGE = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>\n' }}{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Its turns, without the system message that SmolLM2 writes where there is none."""


def build_tokenizer(language: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a language model's folder and `IMAGE`, which comes last."""
    tokenizer = AutoTokenizer.from_pretrained(language)
    tokenizer.add_tokens([AddedToken(IMAGE, normalized=False, special=True)], special_tokens=True)
    tokenizer.chat_template = None  # it is the processor's
    return tokenizer


def split_turn() -> tuple[str, str]:
    """What stands before a picture, and what stands behind a user's text, up to the answer."""
    return "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
