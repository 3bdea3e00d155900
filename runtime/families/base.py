"""What a family does at run time: turn an image and a prompt into the positions of a prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from ..common.errors import ImageError
from ..decoder.prompt_chunks import Block

if TYPE_CHECKING:
    from ..bundle.manifest import Manifest
    from ..text.tokenizer import Tokenizer

Prompt: TypeAlias = "str | bytes | list[dict[str, Any]] | None"
"""A prompt: text (UTF-8 when bytes), chat messages, or None for the bundle's default."""

THUMBNAIL = 32
"""Pixels of a thumbnail's side."""
BOX = 4
"""Pillow's `Resampling.BOX`: a text model needs no Pillow."""


class RawPrompt(str):
    """Text that is tokenized as it is: no chat template is put around it."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class View:
    """One picture or video as a family reads it, before the vision tower has seen it, or, from `Session.encode`, after.

    It may stand wherever its picture may.

    | field | meaning |
    |---|---|
    | `kind` | "image" or "video" |
    | `num_embeds` | how many embeddings it becomes |
    | `read` | makes the inputs of the `vision` graph, one mapping of names to arrays for each run |
    | `frames` | time steps of a video, each of them as many of its embeddings; 1 for a picture |
    | `layout` | what the family gives its embeddings positions by |
    | `encoded` | float [num_embeds, E] once the tower has run |
    | `model` | fingerprint of the model that encoded it |
    | `picture` | the decoded picture, a PIL image of mode RGB, until it is encoded; None of a video |
    | `similar` | True where it stands for a picture that differs from it a little |
    | `written` | what it becomes in the text of a prompt: text, which may name special tokens, and numbers of embeddings in a row; None: `num_embeds` in a row |

    Raises `ValueError` where `written` has another number of embeddings than `num_embeds`.
    """

    kind: str
    num_embeds: int
    read: Callable[[], tuple[Mapping[str, np.ndarray], ...]]
    layout: Any = None
    encoded: np.ndarray | None = None
    model: str | None = None
    frames: int = 1
    picture: Any = None
    similar: bool = False
    written: tuple[str | int, ...] | None = None

    def __post_init__(self) -> None:
        if sum(self.spans) != self.num_embeds:
            raise ValueError(
                f"a view of {self.num_embeds} embeddings writes {sum(self.spans)} into its prompt"
            )

    @property
    def spans(self) -> tuple[int, ...]:
        """How many embeddings it has in a row, each time before text follows."""
        if self.written is None:
            return (self.num_embeds,)
        return tuple(piece for piece in self.written if isinstance(piece, int))

    @functools.cached_property
    def runs(self) -> tuple[Mapping[str, np.ndarray], ...]:
        """What `read` makes, once."""
        return self.read()

    @functools.cached_property
    def digest(self) -> bytes:
        """Of the decoded pixels, of a video of what the tower sees, and of what it becomes in a prompt: equal for equal
        pictures."""
        hasher = sha256(repr((self.kind, self.num_embeds, self.layout)).encode())
        if self.written is not None:
            hasher.update(repr(self.written).encode())
        if self.picture is not None:  # before it is resized, which takes longer
            hasher.update(repr(self.picture.size).encode() + self.picture.tobytes())
            return hasher.digest()
        for run in self.runs:
            for name, values in sorted(run.items()):
                hasher.update(f"{name}{values.dtype}{values.shape}".encode())
                hasher.update(np.ascontiguousarray(values).data)
        return hasher.digest()

    @functools.cached_property
    def thumbnail(self) -> np.ndarray | None:
        """uint8 [32, 32, 3] of a picture, each pixel the mean of a part of it; None of a video."""
        if self.picture is None:
            return None
        small = self.picture.resize((THUMBNAIL, THUMBNAIL), BOX)
        return np.frombuffer(small.tobytes(), np.uint8).reshape(THUMBNAIL, THUMBNAIL, 3)

    def with_image_embeds(self, image_embeds: np.ndarray, model: str) -> View:
        """The same once `model` has made `image_embeds` of it; its pixels are let go."""
        view = replace(self, read=tuple, encoded=image_embeds, model=model, picture=None)
        view.__dict__["digest"] = self.digest
        if "thumbnail" in self.__dict__:
            view.__dict__["thumbnail"] = self.thumbnail
        return view

    def for_another(self) -> View:
        """The same encoded picture, marked as standing for one that differs from it."""
        view = replace(self, similar=True)
        view.__dict__["digest"] = self.digest
        return view


@dataclass(frozen=True)
class Prepared:
    """A request before any graph has run.

    | field | dtype, shape | meaning |
    |---|---|---|
    | `token_ids` | int64 [n] | the prompt, special tokens included; of an encoder-decoder, what its encoder (or, without one, its cross-attention) reads |
    | `views` | | pictures and videos, in the order of their embeddings |
    | `image_positions` | int64 [k] | places in `token_ids` whose embedding an image embedding replaces, in order; None without a picture |
    | `positions` | int64 [axes, n] | positions of the tokens and embeddings; None: 0 … n − 1 |
    | `blocks` | | [first, end) of the places whose rows see each other in both directions; elsewhere a row sees what is before it |
    | `decoder_ids` | int64 [m] | what an encoder-decoder's decoder is prefilled with; None for other models |
    """

    token_ids: np.ndarray
    views: tuple[View, ...] = ()
    image_positions: np.ndarray | None = None
    positions: np.ndarray | None = None
    decoder_ids: np.ndarray | None = None
    blocks: tuple[Block, ...] = ()

    @property
    def vision(self) -> tuple[Mapping[str, np.ndarray], ...]:
        """Inputs of every run of the `vision` graph."""
        return tuple(run for view in self.views for run in view.runs)


class Source(Protocol):
    """What `prepare` reads: a `Bundle`, or anything else with its manifest and tokenizer."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class Family(Protocol):
    """One model family's preprocessing. Families hold no state."""

    name: str

    def view(self, bundle: Source, image: Any) -> View:
        """Read one picture: a path, a PIL image, a uint8 array [H, W, 3], … Raises `ImageError`."""
        ...

    def prepare(self, bundle: Source, image: Any, prompt: Prompt) -> Prepared:
        """Check and lay out one request.

        `image` is what `view` takes, a `View`, a list of them, or None. Raises `ImageError` or `PromptError` naming the
        limit that was broken.
        """
        ...


def views_of(family: Family, bundle: Source, image: Any) -> list[View]:
    """Each picture as `family` reads it; raises as `Family.view`."""
    return [each if isinstance(each, View) else family.view(bundle, each) for each in image_list(image)]


def image_list(image: Any) -> list[Any]:
    """One picture, several, or none, as a list."""
    if image is None:
        return []
    return list(image) if isinstance(image, list | tuple) else [image]


def one_view(family: Family, bundle: Source, image: Any) -> View:
    """The picture of a model that describes one. Raises `ImageError` for none and for several."""
    images = image_list(image)
    if not images:
        raise ImageError("this model describes images: give one (--image FILE)")
    if len(images) > 1:
        raise ImageError(f"this model describes one image at a time, {len(images)} were given")
    return views_of(family, bundle, images)[0]


def prepared_ids(family: Family, token_ids: np.ndarray) -> Prepared:
    """A prompt of ids int64 [n] alone. Raises `ImageError` where the family `needs_picture`."""
    if getattr(family, "needs_picture", False):
        raise needs_picture()
    return Prepared(token_ids)


def needs_picture() -> ImageError:
    """What a model says of text without a picture that it never saw alone."""
    return ImageError("this model reads no text without an image: give one (--image FILE)")


def text_only() -> ImageError:
    """What a model without a vision tower says of any picture."""
    return ImageError("this model reads text only: leave the image out")


def decoder_start(manifest: Manifest) -> np.ndarray:
    """`decoder_ids` int64 [1] of an encoder-decoder: the token that its decoder starts with."""
    start = manifest.text.decoder_start_token_id
    return np.array([0 if start is None else start], np.int64)
