"""Whether a draft's chains at a temperature are drawn from its distribution, or are a function of the request.

Drawn from q and accepted with min(1, p/q), a token survives with probability Σ min(p, q): no way of proposing one token
from q does better. The likeliest token of q, matched with the target's own draw, survives with probability p(argmax q),
and leaves the text that of plain decoding with the same seed, which drawn proposals do not: their text has the same
distribution, but is another draw where a cycle begins elsewhere.
"""

from __future__ import annotations

import numpy as np


class DraftSampling:
    """How the chains of one request are proposed, where that is not `match`.

    With `auto` both chances of acceptance are added up at every judged token, whichever way it was proposed; the larger
    sum decides the next cycle. They depend on the request's text alone.
    """

    def __init__(self, auto: bool):
        self.auto = auto
        self._drawn = self._matched = 0.0

    @property
    def draws(self) -> bool:
        """Whether heads should draw the next chain. Drafts on the trunk always do: matched by a shared uniform, their
        draws agree with at most Σ min(p, q)."""
        return self._drawn >= self._matched

    @np.errstate(all="ignore")
    def compare(self, p: np.ndarray, q: np.ndarray) -> None:
        """Note a judged token: p and q [V] after the same prefix."""
        if self.auto:
            self._drawn += float(np.minimum(p, q).sum())
            self._matched += float(p[int(q.argmax())])
