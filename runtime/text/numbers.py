"""Numbers in English words."""

from __future__ import annotations

_ONES = (  # noqa: SIM905
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905


def in_words(number: int) -> str:
    """A number from 0 to 999,999, as the package num2words writes it ("one hundred and twenty-three").

    Raises `ValueError` for another.
    """
    if not 0 <= number < 1_000_000:
        raise ValueError(f"{number} is not in 0..999999")
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _below_thousand(rest)
    words = f"{_below_thousand(thousands)} thousand"
    if not rest:
        return words
    return f"{words}{' and' if rest < 100 else ','} {_below_thousand(rest)}"


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    words = f"{_ONES[hundreds]} hundred"
    return f"{words} and {_below_hundred(rest)}" if rest else words


def _below_hundred(number: int) -> str:
    if number < 20:
        return _ONES[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
