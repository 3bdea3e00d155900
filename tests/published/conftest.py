"""The tables of the other test rooms can be imported here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support import kept_traces

kept_traces.install()
