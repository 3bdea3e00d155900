"""Stop strings: where text ends, and how much of its end must wait to know."""

from __future__ import annotations

from collections.abc import Iterable


class StopStrings:
    """Looks for stop strings in text that comes in pieces, and hands out what stands before the first.

    Special tokens are pieces that are `hidden`: a text that holds one (of `special_tokens`) is looked for among all
    pieces, any other among those that are shown.
    """

    def __init__(self, texts: Iterable[str], special_tokens: Iterable[str] = ()):
        self.texts = tuple(text for text in texts if text)
        special_tokens = tuple(token for token in special_tokens if token) if self.texts else ()
        self.special = tuple(text for text in self.texts if any(token in text for token in special_tokens))
        """Those that hold a special token."""
        self._plain = tuple(text for text in self.texts if text not in self.special)
        self._tail = ""  # what may begin a stop string
        self._shown: list[bool] = []  # of each of its characters
        self.found = False
        """True once a stop string is complete; later pieces give no text."""

    def take(self, piece: str, hidden: bool = False) -> str:
        """The text that is certain with one more piece."""
        if self.found:
            return ""
        text, shown = self._tail + piece, self._shown + [not hidden] * len(piece)
        places = [at for at, seen in enumerate(shown) if seen]
        visible = text if len(places) == len(text) else "".join(text[at] for at in places)
        # The one completed first wins: that does not depend on where tokens begin and end.
        ends = [(at + len(stop), at) for stop in self.special if (at := text.find(stop)) >= 0]
        for stop in self._plain:
            if (at := visible.find(stop)) >= 0:
                ends.append((places[at + len(stop) - 1] + 1, places[at]))
        if ends:
            self.found, cut = True, min(ends)[1]
            self._tail, self._shown = "", []
        else:
            keep = _beginning(text, self.special)
            if size := _beginning(visible, self._plain):
                keep = max(keep, len(text) - places[-size])
            cut = len(text) - keep
            self._tail, self._shown = text[cut:], shown[cut:]
        return _seen(text[:cut], shown)

    def rest(self) -> str:
        """No more pieces will come: the text that was held back."""
        found = _seen(self._tail, self._shown)
        self._tail, self._shown = "", []
        return found


def _seen(text: str, shown: list[bool]) -> str:
    return "".join(character for character, seen in zip(text, shown, strict=False) if seen)


def _beginning(text: str, stops: Iterable[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
