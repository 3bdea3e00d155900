"""Embeddings of pictures that the vision tower has seen, kept by content, and which one may stand for a similar picture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..common.errors import OptionError
from ..families.base import Prepared, View

if TYPE_CHECKING:
    from ..decoder.decoder import Decoder

MIB = 64
"""MiB of embeddings that a session keeps by default."""
MOST_COMPARED = 64
"""A picture is compared with so many of those that were used last."""
PARTS = 8
"""Parts along each side in which two thumbnails are compared."""


class PictureCache:
    """Encoded pictures and videos by `View.digest`; those that were used last stay. For one thread, as its session.

    `max_bytes`: of all embeddings and thumbnails together. What is larger is not kept; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.encoded = 0
        """Pictures and videos that the tower has seen."""
        self.nbytes = 0
        """Of what is kept."""
        self._views: OrderedDict[bytes, View] = OrderedDict()

    def check(self, similar: float | None) -> None:
        """Raises `OptionError` where `similar` is asked of a session that keeps nothing."""
        if similar is not None and not self.max_bytes:
            raise OptionError(
                f"similar: {similar:g} compares with pictures that the session keeps, and it keeps none; load it with a "
                "picture_cache above 0"
            )

    def recall_all(self, prepared: Prepared, similar: float | None = None) -> Prepared:
        """`prepared` with what is known of its pictures; see `recall`."""
        if not prepared.views:
            return prepared
        return replace(prepared, views=tuple(self.recall(view, similar) for view in prepared.views))

    def recall(self, view: View, similar: float | None = None) -> View:
        """The same picture encoded, where it is kept; else one that differs by at most `similar` (`difference`), marked so;
        else `view` as it is."""
        if view.encoded is not None or not self.max_bytes:
            return view
        known = self._views.get(view.digest)
        if known is not None:
            if similar is not None:  # it may have been kept by a request that compares nothing
                self.nbytes -= _nbytes(known)
                known.__dict__.setdefault("thumbnail", view.thumbnail)
                self.nbytes += _nbytes(known)
        elif similar is not None:
            known = self._nearest(view, similar)
        if known is None:
            return view
        self._views.move_to_end(known.digest)
        return known if known.digest == view.digest else known.for_another()

    def encode(self, decoder: Decoder, view: View) -> View:
        """A picture that nobody encoded, once the tower has seen it; kept from now on."""
        parts = self.encode_in_parts(decoder, view)
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value

    def encode_in_parts(self, decoder: Decoder, view: View) -> Generator[None, None, View]:
        """`encode`, which yields between the runs of the tower: a picture of many tiles has as many."""
        seen_parts = []
        for number, run in enumerate(view.runs):
            if number:
                yield
            seen_parts.append(decoder.image_embeds([run]))
        self.encoded += 1
        image_embeds = np.concatenate(seen_parts)
        image_embeds.flags.writeable = False
        seen = view.with_image_embeds(image_embeds, decoder.manifest.model.fingerprint)
        if _nbytes(seen) <= self.max_bytes:
            self._views[seen.digest] = seen
            self.nbytes += _nbytes(seen)
            while self.nbytes > self.max_bytes:
                self.nbytes -= _nbytes(self._views.popitem(last=False)[1])
        return seen

    def encoded_view(self, decoder: Decoder, view: View, similar: float | None = None) -> View:
        """The picture encoded: as it is kept (`recall`), else once the tower has seen it."""
        known = self.recall(view, similar)
        return known if known.encoded is not None else self.encode(decoder, known)

    def _nearest(self, view: View, similar: float) -> View | None:
        """The most similar picture that the tower has seen, within `similar` of this one. Never one that was itself replaced:
        those are not kept, so a scene that changes slowly is seen again."""
        if view.thumbnail is None:
            return None
        kind = _kind(view)
        found: View | None = None
        for known in islice(reversed(self._views.values()), MOST_COMPARED):
            thumbnail = known.__dict__.get("thumbnail")
            if thumbnail is None or _kind(known) != kind:
                continue
            apart = difference(view.thumbnail, thumbnail)
            if apart <= similar:
                found, similar = known, apart
        return found


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """How much two thumbnails uint8 [32, 32, 3] differ, 0 to 255: the mean absolute difference of the one of 8 × 8 parts
    where it is largest. The mean over a whole picture would hide what is small."""
    apart = np.abs(one.astype(np.int16) - other)
    return float(apart.reshape(PARTS, -1, PARTS, apart.shape[1] // PARTS, 3).mean((1, 3, 4)).max())


def _kind(view: View) -> tuple[Any, ...]:
    """What two pictures must have in common for one to stand where the other does."""
    return view.num_embeds, view.layout, view.written


def _nbytes(view: View) -> int:
    thumbnail = view.__dict__.get("thumbnail")
    return embeds_of(view).nbytes + (0 if thumbnail is None else thumbnail.nbytes)


def embeds_of(view: View) -> np.ndarray:
    """Rows [n, E] of a picture that is encoded."""
    assert view.encoded is not None
    return view.encoded
