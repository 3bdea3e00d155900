"""Accept drafts at a rate, whatever they are: to time models with random weights. The output is not text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..common.validation import number

if TYPE_CHECKING:
    from ..session.session import Session


@contextlib.contextmanager
def forced_acceptance(session: Session, rate: float | None) -> Iterator[None]:
    """Within the block the session's requests accept drafted tokens with probability `rate`; None: as they are.

    `Result.stats.forced` says so. Raises `OptionError` for a rate outside 0..1.
    """
    before = session._forced_acceptance
    session._forced_acceptance = None if rate is None else number("forced acceptance", rate, 0, 1)
    try:
        yield
    finally:
        session._forced_acceptance = before
