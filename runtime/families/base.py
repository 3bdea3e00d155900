"""What a family does at run time: turn an image and a prompt into prompt rows."""

from __future__ import annotations

from collections.abc import Mapping
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

    `token_ids` int64 [n] is the prompt (of the encoder, where there is one), special tokens included. `vision` holds
    the inputs of each run of the `vision` graph, by name. Its rows, concatenated, replace the embeddings at
    `row_slots` int64 [k], in order or as `row_index` int64 [k] picks them. `positions` int64 [axes, n] is None where
    positions count from 0; `decoder_ids` int64 [m] is what the decoder behind an encoder starts with.
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

        `image` is a path, a PIL image, a uint8 array [H, W, 3] or None. Raises `ImageError` or `PromptError`
        naming the limit that was broken.
        """
        ...
