"""Equal modules are traced once."""

from __future__ import annotations

from tests.support import kept_traces

kept_traces.install()
