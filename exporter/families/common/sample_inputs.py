"""A picture and a sentence for every comparison that needs one."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from ....runtime.bundle.manifest import Manifest
from ....runtime.images.synthetic import synthetic_image
from ....runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Sample:
    """What preparing a request reads of a bundle that does not exist yet, or of one with other limits."""

    manifest: Manifest
    tokenizer: Tokenizer


SENTENCE = (
    "a small robot puts the red cube on the table next to the blue cup , then it looks at the green ball . "
)

SAID = {
    "system": "You are a robot . ",
    "user": "look at the table , please . ",
    "assistant": "a red cube is on the table . ",
}
"""What each role says in a conversation."""

CONVERSATIONS = tuple(
    [{"role": role, "content": SAID[role]} for role in roles]
    for roles in (
        ("user",),
        ("system", "user"),
        ("user", "assistant", "user"),
        ("system", "user", "assistant", "user", "assistant", "user"),
    )
)
"""Messages that a chat template is tried with: one turn and three, without and with a turn of the system."""

ODD_SIZES = ((61, 83), (97, 45), (33, 33), (240, 317))
"""(height, width) of pictures that fit no vision tower: wide, tall, small and larger than most towers."""


def odd_picture(seed: int) -> Image.Image:
    """One of the pictures of `ODD_SIZES`."""
    return Image.fromarray(synthetic_image(*ODD_SIZES[seed % len(ODD_SIZES)]))
