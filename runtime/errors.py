"""Deprecated: every error is a name of `vlmexport.runtime`. Goes with the next release."""

from __future__ import annotations

import warnings

from .common.errors import *  # noqa: F403

warnings.warn(
    "vlmexport.runtime.errors is deprecated: import errors from vlmexport.runtime",
    DeprecationWarning,
    stacklevel=2,
)
