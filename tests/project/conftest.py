"""The tables of the other test rooms can be imported here."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), *(str(TESTS / room) for room in ("contract", "calibration"))]
