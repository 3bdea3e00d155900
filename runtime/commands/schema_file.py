"""`vlmexport run --schema FILE`: a JSON schema that the answer keeps to."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.bounded_files import read_json
from ..common.errors import OptionError
from ..grammars.grammar import LONGEST, Grammar, of_schema

if TYPE_CHECKING:
    from ..session.result import Result

log = logging.getLogger(__name__)


def read_schema(path: Path | None) -> Grammar | None:
    """The schema of the file `path`; None without a path. Raises `OptionError` for a file that is none."""
    if path is None:
        return None
    try:
        return of_schema("schema", read_json(path, LONGEST, OptionError))
    except OSError as error:
        raise OptionError(f"--schema {path}: cannot be read ({error.strerror})") from error


def warn_if_cut(result: Result) -> None:
    """Say that an answer is no whole one of its grammar."""
    if result.parse is not None and result.finish_reason != "eos":
        log.warning(
            "The answer was cut (%s): it is not whole, and no valid JSON; give a higher --max-new-tokens.",
            result.finish_reason,
        )
