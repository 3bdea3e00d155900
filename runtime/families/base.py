"""What a family does at run time: turn an image and a prompt into prompt rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from ..errors import ImageError

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest
    from ..text.tokenizer import Tokenizer

Prompt: TypeAlias = "str | bytes | list[dict[str, Any]] | None"
"""A prompt: text (UTF-8 when bytes), chat messages, or None for the bundle's default."""


class RawPrompt(str):
    """Text that is tokenized as it is: no chat template is put around it."""

    __slots__ = ()


@dataclass(frozen=True)
class Prepared:
    """A request before any graph has run.

    | field | dtype, shape | meaning |
    |---|---|---|
    | `token_ids` | int64 [n] | the prompt, special tokens included; of an encoder-decoder, what its encoder (or, without one, its cross-attention) reads |
    | `vision` | input name → array | one mapping for each run of the `vision` graph |
    | `row_slots` | int64 [k] | places in `token_ids` whose embedding an image row replaces; None without a picture |
    | `row_index` | int64 [k] | which row of the concatenated vision outputs goes there; None: in order |
    | `positions` | int64 [axes, n] | positions of the rows; None: 0 … n − 1 |
    | `decoder_ids` | int64 [m] | what an encoder-decoder's decoder is prefilled with; None for other models |
    """

    token_ids: np.ndarray
    vision: tuple[Mapping[str, np.ndarray], ...] = ()
    row_slots: np.ndarray | None = None
    row_index: np.ndarray | None = None
    positions: np.ndarray | None = None
    decoder_ids: np.ndarray | None = None


class Source(Protocol):
    """What `prepare` reads: a `Bundle`, or anything else with its manifest and tokenizer."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class Family(Protocol):
    """One model family's preprocessing. Families hold no state."""

    name: str

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Check and lay out one request.

        `image` is a path, a PIL image, a uint8 array [H, W, 3], a list of them, or None. Raises `ImageError` or
        `PromptError` naming the limit that was broken.
        """
        ...


def image_list(image: Any) -> list[Any]:
    """One picture, several, or none, as a list."""
    if image is None:
        return []
    return list(image) if isinstance(image, list | tuple) else [image]


def one_image(image: Any) -> Any:
    """The picture of a model that describes one. Raises `ImageError` for none and for several."""
    images = image_list(image)
    if not images:
        raise ImageError("this model describes images: give one (--image FILE)")
    if len(images) > 1:
        raise ImageError(f"this model describes one image at a time, {len(images)} were given")
    return images[0]


def decoder_start(manifest: Manifest) -> np.ndarray:
    """`decoder_ids` int64 [1] of an encoder-decoder: the token that its decoder starts with."""
    start = manifest.text.decoder_start_token_id
    return np.array([0 if start is None else start], np.int64)
