"""What a family does at run time: turn an image and a prompt into prompt rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

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

    `token_ids` is int64 [n], special tokens included; where an image row of the `vision` graph replaces the
    embedding, it holds `text.image_token_id` (exactly `text.image_rows` of them per image, in row order).
    `pixel_values` is float32 [1, 3, H, W], the input of the `vision` graph, or None without an image.
    """

    token_ids: np.ndarray
    pixel_values: np.ndarray | None = None


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

        `image` is a path, a PIL image, a uint8 array [H, W, 3] or None. Raises `ImageError` or `PromptError`
        naming the limit that was broken.
        """
        ...
