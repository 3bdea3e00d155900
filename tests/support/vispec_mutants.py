"""Errors of a ViSpec draft: none of them changes a token, each makes its proposals worse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vlmexport.runtime.drafts.eagle import vispec
from vlmexport.runtime.drafts.eagle.vispec import Vispec
from vlmexport.runtime.drafts.eagle.vispec_embeds import VisualEmbeds
from vlmexport.runtime.drafts.eagle.vispec_pairs import Pair

Patch = pytest.MonkeyPatch


def no_global_feature(patch: Patch) -> None:
    """Text behind a picture, drafted text included, does not know it."""
    know = VisualEmbeds.know
    patch.setattr(VisualEmbeds, "know", lambda self, place, feature: know(self, place, None))


def no_global_feature_in_prompts(patch: Patch) -> None:
    """Text of a prompt behind a picture does not know it."""
    _changed_pairs(patch, lambda pair: pair if pair.compressed else replace(pair, visual=None))


def _changed_pairs(patch: Patch, change: Any) -> None:
    pairs = vispec.pairs_of

    def wrong(pictures: Any, first: int, end: int) -> list[Pair]:
        return [change(pair) for pair in pairs(pictures, first, end)]

    patch.setattr(vispec, "pairs_of", wrong)


def tokens_at_first_positions(patch: Patch) -> None:
    """A picture's tokens stand where it begins, not where it ends."""
    pairs = vispec.pairs_of

    def wrong(pictures: Any, first: int, end: int) -> list[Pair]:
        back = {
            seen.end - 2 - i: seen.pairs.start + len(seen.shown) - 1 - i
            for seen in pictures
            for i in range(len(seen.shown))
        }
        return [
            replace(pair, position=back[pair.position]) if pair.compressed else pair
            for pair in pairs(pictures, first, end)
        ]

    patch.setattr(vispec, "pairs_of", wrong)


def tokens_taken_for_text(patch: Patch) -> None:
    """A picture's tokens are taken for global features: placeholders enter the layer in their place."""
    _changed_pairs(patch, lambda pair: replace(pair, compressed=False))


def pictures_left_in(patch: Patch) -> None:
    """All pairs of a picture are run, as an EAGLE layer does."""
    pairs = vispec.pairs_of

    def wrong(pictures: Any, first: int, end: int) -> list[Pair]:
        known = {pair.position: pair for pair in pairs(pictures, first, end)}
        return [known.get(position, Pair(position, None)) for position in range(first, end)]

    patch.setattr(vispec, "pairs_of", wrong)


def gaps_closed(patch: Patch) -> None:
    """Text behind a picture stands where its slot is."""
    run = vispec.Vispec._run_pairs

    def wrong(self: Any, sequences: Any, place: int, *rest: Any) -> Any:
        whole = self._pass.run

        def moved(features: Any, asked: Any, row: int = 0) -> Any:
            batch, width = self._pass._shape
            starts = self._pass._indices.host((batch,))
            self._pass._positions.host((batch, width))[:] = starts[:, None] + np.arange(width)
            return whole(features, asked, row)

        self._pass.run = moved
        try:
            return run(self, sequences, place, *rest)
        finally:
            del self._pass.run

    patch.setattr(Vispec, "_run_pairs", wrong)


def global_feature_of_another(patch: Patch) -> None:
    """The last sequence takes the place of one that leaves, what it knows of its picture does not."""
    patch.setattr(VisualEmbeds, "move", lambda self, source, place: None)


def stale_picture(patch: Patch) -> None:
    """A further turn's picture is not looked at: the one before stays in sight."""
    on_pictures = Vispec.on_pictures

    def wrong(self: Any, sequence: Any, pictures: Any) -> None:
        on_pictures(self, sequence, pictures)
        old = self._pictures.get(self._ended, []) if self._resumed else []
        self._pictures[sequence] = [
            replace(seen, feature=old[-1].feature) if old else seen for seen in self._pictures[sequence]
        ]

    patch.setattr(Vispec, "on_pictures", wrong)


def pictures_of_earlier_turns_forgotten(patch: Patch) -> None:
    """A further turn without a picture does not know the one before."""
    resume = Vispec.resume

    def wrong(self: Any, length: int) -> None:
        resume(self, length)
        self._pictures[self._ended] = []

    patch.setattr(Vispec, "resume", wrong)


def frames_not_averaged(patch: Patch) -> None:
    """Text behind a video knows its last frame alone."""
    read = Vispec._read

    def wrong(self: Any, picture: Any) -> Any:
        (last,) = read(self, replace(picture, image_embeds=picture.image_embeds[-1:]))
        return [replace(seen, feature=last.feature) for seen in read(self, picture)]

    patch.setattr(Vispec, "_read", wrong)
