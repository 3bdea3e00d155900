"""The targets of the training tests can be imported here."""

from __future__ import annotations

import sys
from pathlib import Path

import kept_traces

sys.path.append(str(Path(__file__).resolve().parents[1] / "calibration"))

kept_traces.install()
