"""Pictures and conversations of the tests of LLaVA and LLaVA-NeXT."""

from __future__ import annotations

from typing import Any

from PIL import Image
from vlmexport.runtime.images.synthetic import synthetic_image

# Of three sizes; those for LLaVA-NeXT have different numbers of tiles and rows.
PICTURES = {
    "llava": [Image.fromarray(synthetic_image(*size)) for size in ((50, 70), (97, 33), (32, 32))],
    "llava-next": [Image.fromarray(synthetic_image(*size)) for size in ((50, 70), (30, 170), (64, 33))],
}
TALK: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "the red cup"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "it is on the table"}]},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is left of the cup"}]},
]


def processed(processor: Any, images: list[Any], messages: list[Any]) -> Any:
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    return processor(images=images or None, text=text, return_tensors="pt", add_special_tokens=False)


def question(count: int) -> list[dict[str, Any]]:
    content = [*[{"type": "image"}] * count, {"type": "text", "text": "the red cup"}]
    return [{"role": "user", "content": content}]
