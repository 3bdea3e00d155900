"""What a decoding cycle takes outside its graphs, from whole requests on the engine at hand."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ...common.errors import VlmexportError
from ...images.synthetic import synthetic_image
from ...session.session import Session
from .points import SIDE

TOKENS, REPEATS = 12, 5


@dataclass(frozen=True)
class Cycles:
    """Median seconds of a cycle, and of that inside the engine's calls: None where these return before they are done."""

    whole: float
    inside: float | None

    def host(self, graphs: float) -> float:
        """Seconds that are the host's, of a cycle whose graphs take so long."""
        return max(0.0, self.whole - (graphs if self.inside is None else self.inside))


def time_cycles(session: Session, draft: str | None, length: int) -> Cycles | None:
    """Cycles with `length` drafted tokens, or plain ones without a `draft`. None where the bundle has no room for a picture
    and a few tokens, or no cycle was done."""
    image = session.bundle.manifest.image
    picture = None if image is None else synthetic_image(image.height or SIDE, image.width or SIDE)
    whole, inside = [], []
    for number in range(REPEATS + 1):  # the first request binds, and captures
        try:
            stats = session.generate(
                picture, None if picture is not None else "a", max_new_tokens=TOKENS, draft=draft or "none",
                draft_length=length or None, ignore_eos=True, adaptive="off",
            ).stats  # fmt: skip
        except VlmexportError:
            return None
        if number and stats.cycles:
            whole.append(stats.decode_seconds / stats.cycles)
            inside.append((stats.engine_seconds or 0.0) / stats.cycles)
    if not whole:
        return None
    return Cycles(statistics.median(whole), statistics.median(inside) if all(inside) else None)
