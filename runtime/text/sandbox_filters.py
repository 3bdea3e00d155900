"""Filters, tests and methods of texts that pay for what they are given and for what they make, before they make it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2.filters import ignore_case, make_attrgetter
from jinja2.sandbox import SecurityError
from jinja2.utils import pass_environment
from markupsafe import escape, soft_str

from .meter import METER, SIZED, UNIT_BYTES, Meter

_NOT_INTO = ("length", "count", "default", "d", "first", "last")
"""Filters that look at the value itself, not into it."""
_TAKE_ALL = ("join", "sum", "sort", "unique", "groupby", "min", "max", "in")
"""Filters and a test that hash, compare or print elements: lazy ones must all be known, to be paid for."""
_ATTRIBUTE_AT = {
    "map": None, "selectattr": 0, "rejectattr": 0, "groupby": 0, "sum": 0, "unique": 1, "min": 1, "max": 1, "join": 1,
    "sort": 2,
}  # fmt: skip
"""Filters that look up an attribute of every element → its place among their arguments; None: by name only."""
_MOST_PARTS = 32
"""Of such an attribute: "a.b.c" has three."""
_PRINT = ("replace", "format", "trim", "center")
"""Filters that make a text of whatever they are given."""


@pass_environment
def unique(
    environment: Any, value: Any, case_sensitive: bool = False, attribute: Any = None
) -> Iterator[Any]:
    """Jinja's filter; of keys of one hash, few are compared."""
    key_of = make_attrgetter(environment, attribute, None if case_sensitive else ignore_case)
    seen: set[Any] = set()
    hashes: Counter[int] = Counter()
    for item in value:
        key = key_of(item)
        if key not in seen:
            seen.add(key)
            code = hash(key)
            hashes[code] += 1
            METER.get().equal_hashes({code: hashes[code]})
            yield item


def paying(name: str, function: Callable[..., Any], slow: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """The filter or test, which pays for its arguments and its result; a `slow` one for every character."""
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        meter, values = METER.get(), args[skip:]
        if name in _TAKE_ALL:
            values = tuple(map(taken, values))
            kwargs = {key: taken(each) for key, each in kwargs.items()}
        characters = meter.things(*(values[1:] if name in _NOT_INTO else values), kwargs)
        if name in slow:
            meter.pay(characters)
        if name in _ATTRIBUTE_AT:
            _check_parts(kwargs.get("attribute"), _ATTRIBUTE_AT[name], values[1:])
        if values:
            value, *rest = values
            if name in _PRINT:
                value = soft_str(value)
            values = (value, *pay_text(meter, name, value, tuple(rest), kwargs))
        return meter.made(function(*args[:skip], *values, **kwargs))

    return run


def _check_parts(attribute: Any, place: int | None, args: tuple[Any, ...]) -> None:
    """Refuse an attribute whose parts take longer to look up than the elements that are paid for."""
    if attribute is None and place is not None and place < len(args):
        attribute = args[place]
    if not isinstance(attribute, str | int | None):
        raise SecurityError(f"an attribute that is {type(attribute).__name__}")
    if isinstance(attribute, str) and len(re.findall("[.,]", attribute)) >= _MOST_PARTS:
        raise SecurityError(f"an attribute of more than {_MOST_PARTS} parts")


def taken(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def pay_text(
    meter: Meter,
    name: str,
    value: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    method: bool = False,
) -> tuple[Any, ...]:
    """Pay for what a filter or a `method` of a text makes beyond its arguments; returns the arguments to call it with."""
    values = (*args, *kwargs.values())
    size = len(value) if isinstance(value, str) else 0
    # A width, a number of parts, a number of digits: at most as much work as its value says.
    meter.pay(sum(abs(number) for number in values if isinstance(number, int)))
    texts = [len(text) for text in values if isinstance(text, str)]
    if name == "replace":
        words = [soft_str(each) for each in values]  # in any order, where they are given by name
        place = escape(value) if any(hasattr(each, "__html__") for each in (value, *values)) else value
        occurrences = max((place.count(word) for word in words), default=0)
        meter.text(len(place) + (occurrences + 1) * max(map(len, words), default=0))
    elif name in ("rfind", "rindex", "rsplit", "rpartition") or name in (
        "strip",
        "lstrip",
        "rstrip",
        "trim",
    ):  # Python looks from the end without its fast search
        meter.pay(size * max([0, *texts]) // UNIT_BYTES)
    elif name == "indent":
        lines = value.count("\n") + 1 if size else 1
        meter.pay(lines)
        widths = [number for number in values if isinstance(number, int)] or [4]
        meter.text(size + lines * max(*widths, *texts, 0))
    elif name == "join" and method:  # value stands between
        parts = list(args[0]) if args else []
        meter.text(size * len(parts) + meter.things(*parts))
        args = (parts, *args[1:])
    elif name == "join":
        parts = len(value) if isinstance(value, (str, *SIZED)) else 0
        meter.text(max([0, *texts]) * parts + meter.things(value))
    elif name in ("format", "format_map") and isinstance(value, str):
        pay_format(meter, value, values)
    elif name == "sum" and not all(isinstance(start, int | float | str) for start in values):
        raise SecurityError("sum of anything but numbers")
    elif name == "int" and size > 1000:
        raise SecurityError("a number of more than 1000 digits")
    return args


def pay_format(meter: Meter, form: str, values: Iterable[Any]) -> None:
    """Pay for `form % given` and `form.format(given)`: every field may be any of the values."""
    # Names in brackets may hold anything, so that the end of a field is not seen behind them.
    named = re.search(r"%\(|\[", form) and re.search(r"\d{4}", form)
    if named or re.search(r"[%][^%a-zA-Z]*(?:\d{4}|\*)|\{[^{}]*(?:\d{4}|\{(?!\{))", form):
        raise SecurityError("a format with a width of four digits, or one that is computed")
    before = meter.left
    characters = meter.things(*values)
    fields = form.count("%") + form.count("{")
    meter.pay((before - meter.left) * fields)
    meter.text(len(form) + (1000 + characters) * fields)
