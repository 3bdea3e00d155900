"""Stop strings: where text ends, and how much of its end must wait to know."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

LONGEST = 100_000
"""Characters of all stop strings of a request: each piece of its text is compared with them."""

_SHORT = 256
"""Characters: longer ones are looked for one by one, of which there are few."""

_FEW = 16
"""So many texts are looked for one by one, too."""


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
        special = set(self.special)
        self._special = _TextFinder(self.special)
        self._plain = _TextFinder(text for text in self.texts if text not in special)
        self._tail = ""  # what may begin a stop string
        self._shown: list[bool] = []  # of each of its characters
        self.stopped = False
        """True once a stop string is complete; later pieces give no text."""

    def take(self, piece: str, hidden: bool = False) -> str:
        """The text that is certain with one more piece."""
        if self.stopped:
            return ""
        text, shown = self._tail + piece, self._shown + [not hidden] * len(piece)
        places = [at for at, seen in enumerate(shown) if seen]
        visible = text if len(places) == len(text) else "".join(text[at] for at in places)
        # The one completed first wins: that does not depend on where tokens begin and end.
        ends = self._special.find(text, len(self._tail))
        plain = self._plain.find(visible, sum(self._shown))
        ends += [(places[end - 1] + 1, places[at]) for end, at in plain]
        if ends:
            self.stopped, cut = True, min(ends)[1]
            self._tail, self._shown = "", []
        else:
            keep = self._special.beginning(text)
            if size := self._plain.beginning(visible):
                keep = max(keep, len(text) - places[-size])
            cut = len(text) - keep
            self._tail, self._shown = text[cut:], shown[cut:]
        return _seen(text[:cut], shown)

    def rest(self) -> str:
        """No more pieces will come: the text that was held back."""
        text = _seen(self._tail, self._shown)
        self._tail, self._shown = "", []
        return text


def _seen(text: str, shown: list[bool]) -> str:
    return "".join(character for character, seen in zip(text, shown, strict=False) if seen)


class _TextFinder:
    """Texts that are looked for all at once: in a sorted list, what begins another text stands right before it."""

    def __init__(self, texts: Iterable[str]):
        chosen: list[str] = []
        for text in sorted(set(texts)):
            # One that begins with another is never completed first.
            if not chosen or not text.startswith(chosen[-1]):
                chosen.append(text)
        few = len(chosen) <= _FEW
        self._short = [text for text in chosen if len(text) <= _SHORT and not few]
        self._long = [text for text in chosen if len(text) > _SHORT or few]

    def find(self, text: str, known: int = 0) -> list[tuple[int, int]]:
        """(end, begin) of texts that stand in `text`, the one that ends first among them; none ends in the first `known`
        characters."""
        ends = [(at + len(each), at) for each in self._long if (at := text.find(each)) >= 0]
        if not self._short:
            return ends
        for at in range(max(0, known - _SHORT), len(text)):
            place = bisect_right(self._short, text[at : at + _SHORT]) - 1
            if place >= 0 and text.startswith(self._short[place], at):
                ends.append((at + len(self._short[place]), at))
        return ends

    def beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins one of the texts and is not all of it."""
        longest = 0
        for each in self._long:
            for size in range(min(len(each) - 1, len(text)), longest, -1):
                if text.endswith(each[:size]):
                    longest = size
                    break
        for size in range(min(_SHORT - 1, len(text)), longest if self._short else _SHORT, -1):
            end = text[-size:]
            place = bisect_right(self._short, end)
            if place < len(self._short) and self._short[place].startswith(end):
                return size
        return longest
