"""ViSpec: an EAGLE layer that sees a picture as a few tokens and a global feature (arXiv 2509.15235).

The adaptor reads the embeddings of a picture once, before its prompt. The layer runs the pairs of text, and the
picture's tokens in place of its embeddings (`vispec_pairs.py`). Of a video every frame is a picture, and their global
features are averaged. Behind the prompt it drafts as EAGLE does, with the last picture's global feature in sight.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ...common.errors import BundleError
from ...decoder.vision import Vision
from ...speculative.proposer import Picture
from .eagle import Eagle
from .vispec_embeds import VisualEmbeds
from .vispec_options import VispecOptions
from .vispec_pairs import Pair, Seen, pairs_of, slots_before

if TYPE_CHECKING:
    from ...bundle.manifest import DraftInfo
    from ...decoder.decoder import Decoder
    from ...engines.base import View
    from ...speculative.sequence import Sequence
    from .layer_pass import Beside


class Vispec(Eagle):
    """The draft kind `vispec`. Keeps, beside what `Eagle` keeps, what it sees of every open sequence's pictures.

    Raises `BundleError` for a draft without its adaptor, and as `Eagle`.
    """

    needs_pictures: ClassVar[bool] = True
    role: ClassVar[str] = "vispec"

    def __init__(self, draft: DraftInfo, decoder: Decoder):
        adaptor = draft.graphs.get("adaptor")
        queries = draft.options.queries if isinstance(draft.options, VispecOptions) else None
        if adaptor is None or queries is None:
            raise BundleError(f"manifest: draft {draft.name!r} has no adaptor; build the bundle again")
        super().__init__(draft, decoder)
        self._adaptor = Vision(decoder.engine, adaptor)
        self._pictures: dict[Sequence, list[Seen]] = {}

    def _beside(self, graph: str, decoder: Decoder) -> Beside | None:
        batch = decoder.arena.max_batch
        places = max(self._widest, batch * decoder.max_width)
        self._visual = VisualEmbeds(self.name, decoder.engine, graph, self._size, batch, self._widest, places)
        return self._visual

    def on_pictures(self, sequence: Sequence, pictures: Items[Picture]) -> None:
        """Let the adaptor read them."""
        before = self._pictures[self._ended] if self._resumed and self._ended is not None else []
        self._pictures[sequence] = before + [seen for picture in pictures for seen in self._read(picture)]

    def on_hidden_states(self, sequence: Sequence, slot: int, hidden_states: View) -> None:
        """As `Eagle`; what the sequence knows of pictures is that of its last one."""
        before = self._ended
        super().on_hidden_states(sequence, slot, hidden_states)
        if before is not None and before is not self._ended:
            self._pictures.pop(before, None)
        pictures = self._pictures.get(sequence)
        self._visual.know(self._open.index(sequence), pictures[-1].feature if pictures else None)

    def end(self, sequence: Sequence) -> None:
        """As `Eagle`."""
        super().end(sequence)
        if sequence is not self._ended:
            self._pictures.pop(sequence, None)

    def _forget(self, sequence: Sequence) -> None:
        self._visual.move(len(self._open) - 1, self._open.index(sequence))
        super()._forget(sequence)

    def resume(self, length: int) -> None:
        """Keep the first pairs of the last request, and the pictures among them, for the next one."""
        super().resume(length)
        assert self._ended is not None
        pictures = self._pictures[self._ended]
        self._pictures[self._ended] = [seen for seen in pictures if seen.end <= length]

    def _slots_before(self, sequence: Sequence, position: int) -> int:
        return slots_before(self._pictures[sequence], position)

    def _read(self, picture: Picture) -> list[Seen]:
        """One picture, or the frames of a video, in order."""
        made = [self._adaptor.run([{"image_rows": frame}]) for frame in picture.image_embeds]
        feature = np.stack([embeds[-1] for embeds in made]).mean(0, np.float32)
        count = picture.image_embeds.shape[1]
        starts = range(picture.start, picture.start + count * len(made), count)
        return [
            Seen(start, start + count, embeds[:-1], feature)
            for start, embeds in zip(starts, made, strict=True)
        ]

    def _pairs(self, sequence: Sequence, first: int, end: int) -> list[Pair]:
        return pairs_of(self._pictures.get(sequence, []), first, end)

    def _kept(self, sequence: Sequence, first: int, end: int) -> np.ndarray:
        return np.array([pair.position for pair in self._pairs(sequence, first, end)], np.int64)

    def _mark(self, sequence: Sequence, batch_index: int, positions: np.ndarray) -> None:
        self._visual.mark(batch_index, self._pairs(sequence, int(positions[0]), int(positions[-1]) + 1))
