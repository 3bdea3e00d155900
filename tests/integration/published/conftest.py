"""The tables of the other test rooms can be imported here."""

from __future__ import annotations

from tests.support import kept_traces

kept_traces.install()
