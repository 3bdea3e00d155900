"""Options of the release before: each is translated with a `DeprecationWarning`, and leaves with the next release."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..common.validation import integer, number

if TYPE_CHECKING:
    from ..bundle.folder import Bundle


def translate(options: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """(options of today, the rate of `force_acceptance` where that was given). Raises `OptionError` for wrong values."""
    current, forced = dict(options), None
    numbers = {name: current.pop(f"typical_{name}", None) for name in ("epsilon", "delta")}
    given = {name: value for name, value in numbers.items() if value is not None}
    if given:
        from ..sampling.typical import Typical

        warn("typical_epsilon and typical_delta", "give lossy=Typical(epsilon, delta)")
        criterion = Typical(**given)
        if current.get("lossy") == "typical":
            current["lossy"] = criterion
    if (rate := current.pop("force_acceptance", None)) is not None:
        warn("force_acceptance", "use vlmexport.runtime.measure.forced_acceptance")
        forced = number("force_acceptance", rate, 0, 1)
    if current.get("adaptive") == "logistic":
        from ..policy.logistic import LogisticLength

        warn('adaptive="logistic"', "leave it out: any fixed length that suits the draft is faster")
        del current["adaptive"]
        lengths = (current.get("policy"), current.get("draft_length"), current.get("draft_nodes"))
        if all(length is None for length in lengths):
            tokens = integer("max_new_tokens", current.get("max_new_tokens", 128), 1)
            threshold = current.get("confidence_threshold")
            current["policy"] = LogisticLength.of(tokens, LogisticLength.longest, threshold)
    return current, forced


def with_verify_width(bundle: Bundle, deprecated: dict[str, Any]) -> Bundle:
    """`verify_width`, once an argument of `Session.load`. Raises `TypeError` for any other name."""
    width = deprecated.pop("verify_width", None)
    if deprecated:
        raise TypeError(f"Session.load() got an unexpected keyword argument {min(deprecated)!r}")
    if width is None:
        return bundle
    warn("verify_width", "build the bundle with it (`vlmexport build --verify-width`)", level=4)
    return bundle.with_verify_width(width)


def warn(name: str, remedy: str, level: int = 7) -> None:
    """Say that `name` is deprecated, and what to do."""
    warnings.warn(
        f"{name} is deprecated and leaves with the next release: {remedy}",
        DeprecationWarning,
        stacklevel=level,
    )
