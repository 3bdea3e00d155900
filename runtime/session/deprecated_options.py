"""Options of the release before: each is translated with a `DeprecationWarning`, and leaves with the next release."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..common.validation import integer, number

if TYPE_CHECKING:
    from ..bundle.folder import Bundle

REQUEST = 7
"""Calls from `translate` up to the caller of `Session.generate`, as `stacklevel` counts."""


def translate(options: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """(options of today, the rate of `force_acceptance` where that was given). Raises `OptionError` for wrong values."""
    current, forced = dict(options), None
    numbers = {name: current.pop(f"typical_{name}", None) for name in ("epsilon", "delta")}
    given = {name: value for name, value in numbers.items() if value is not None}
    if given:
        from ..sampling.typical import Typical

        warn("typical_epsilon and typical_delta", "give lossy=Typical(epsilon, delta)", REQUEST)
        criterion = Typical(**given)
        if current.get("lossy") == "typical":
            current["lossy"] = criterion
    if (rate := current.pop("force_acceptance", None)) is not None:
        warn("force_acceptance", "use vlmexport.runtime.measure.forced_acceptance", REQUEST)
        forced = number("force_acceptance", rate, 0, 1)
    if current.get("adaptive") == "logistic":
        from ..policy.logistic import LogisticLength

        warn('adaptive="logistic"', "leave it out: any fixed length that suits the draft is faster", REQUEST)
        del current["adaptive"]
        lengths = (current.get("policy"), current.get("draft_length"), current.get("draft_nodes"))
        if all(length is None for length in lengths):
            tokens = integer("max_new_tokens", current.get("max_new_tokens", 128), 1)
            threshold = current.get("confidence_threshold")
            current["policy"] = LogisticLength.of(tokens, LogisticLength.longest, threshold)
    return current, forced


def verify_width_of(deprecated: Mapping[str, Any]) -> int | None:
    """Once an argument of `Session.load`. Raises `TypeError` for any other name."""
    unknown = deprecated.keys() - {"verify_width"}
    if unknown:
        raise TypeError(f"Session.load() got an unexpected keyword argument {min(unknown)!r}")
    return deprecated.get("verify_width")


def with_verify_width(
    bundle: Bundle, width: int | None, name: str, warn: Callable[[str, str], None]
) -> Bundle:
    """The bundle with the `verify_width` that was given as `name`, of which it warns. Raises `OptionError`."""
    if width is None:
        return bundle
    warn(name, "build the bundle with it (`vlmexport build --verify-width`)")
    return bundle.with_verify_width(width)


def deprecation(name: str, remedy: str) -> str:
    """The sentence that says that `name` is deprecated, and what to do."""
    return f"{name} is deprecated and leaves with the next release: {remedy}"


def warn(name: str, remedy: str, level: int = 4) -> None:
    """Warn the caller that is `level` calls up: by default that of the method that calls `with_verify_width`."""
    warnings.warn(deprecation(name, remedy), DeprecationWarning, stacklevel=level)
