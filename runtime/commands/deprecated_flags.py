"""Flags of the release before: hidden, translated with a warning, gone with the next release."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ..common.errors import OptionError
from ..common.options import Integer, Number
from ..session.deprecated_options import deprecation, with_verify_width

if TYPE_CHECKING:
    from ..bundle.folder import Bundle

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeprecatedFlags:
    """Of `run` and `bench`."""

    typical_epsilon: Annotated[float | None, Number(hidden=True)] = None
    typical_delta: Annotated[float | None, Number(hidden=True)] = None
    verify_width: Annotated[int | None, Integer(hidden=True)] = None

    def translate(self, options: dict[str, Any]) -> None:
        """Change `options` of a request to what is meant. Raises `OptionError`."""
        if options.get("adaptive") == "logistic":
            warn("--adaptive logistic", "leave it out")
        for name in ("epsilon", "delta"):
            value = getattr(self, f"typical_{name}")
            if value is None:
                continue
            if options.get("lossy") != "typical":
                raise OptionError(
                    f"--typical-{name} {value:g} is of --lossy typical: give it, too, or leave this out"
                )
            warn(f"--typical-{name}", "write --lossy typical:EPSILON,DELTA")
            options[f"typical_{name}"] = value

    def with_verify_width(self, bundle: Bundle) -> Bundle:
        """The bundle as `--verify-width` wants it. Raises `OptionError`."""
        return with_verify_width(bundle, self.verify_width, "--verify-width", warn)


@dataclass(frozen=True, kw_only=True)
class DeprecatedBenchFlags(DeprecatedFlags):
    """Of `bench` alone."""

    force_acceptance: Annotated[float | None, Number(high=1, hidden=True)] = None


def warn(flag: str, remedy: str) -> None:
    """Say on stderr that a flag is deprecated, and what to do."""
    log.warning(deprecation(flag, remedy))
