"""How much work a regular expression may take on a text, read from the pattern alone.

The `tokenizers` library matches with Oniguruma, which backtracks and cannot be interrupted. Its work is bounded here as
that of trying every way through the pattern at every place of a text, where a repeat without an end counts as long as
the run of characters that it may stand on. A match ends the search at its place and consumes its text, so repeats
behind which nothing can fail cost one step for each character.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers

from .regex_costs import RegexCosts, Steps
from .regex_reader import RegexReader

STEPS = 1_000_000_000
"""Steps of all regular expressions over a text, of 1 to 7 ns each where runs are long."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_MARKED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_REST = rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
LINEAR = frozenset({
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    _WORDS % "",  # Qwen2
    _WORDS % "{1,3}",  # Llama 3
    _MARKED,  # Qwen3.5
    _CASED % ((_CONTRACTIONS + "?",) * 2) + _REST % "{1,3}",  # o200k
    _CASED % ("", "") + _REST % "",  # tekken
})  # fmt: skip
"""Published patterns whose last alternatives take the whole run that the ones before them have failed on."""

_SHORT = 16


@dataclass(frozen=True)
class Work:
    """Steps at one place of a text, and patterns of the characters that runs are made of."""

    steps: Steps
    runs: tuple[str, ...]

    def on(self, size: int, text: str | None) -> int:
        """Steps over a text of at most `size` characters, fewer where the text is known and its runs are short."""
        linear, square = self.steps.fixed * size, self.steps.per_run * size * size
        if square > STEPS // 10 and text is not None:
            square = self.steps.per_run * sum(_squares(characters, text) for characters in self.runs)
        return linear + square


def _squares(characters: str, text: str) -> int:
    """The sum of the squares of the lengths of runs, at most; those below `_SHORT` are not looked for."""
    split = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(f"(?:{characters}){{{_SHORT},}}"), "removed", invert=True
    )
    return _SHORT * len(text) + sum((end - start) ** 2 for _, (start, end) in split.pre_tokenize_str(text))


def work_of(pattern: str) -> Work:
    """The work of a pattern; raises `UnreadableRegex`."""
    node = RegexReader(pattern).read()
    costs = RegexCosts()
    steps = costs.of(node, True, True)[1]
    return Work(Steps(steps.fixed), ()) if pattern in LINEAR else Work(steps, tuple(sorted(costs.runs)))
