"""Speed-ups that FastVLM (arXiv 2510.22641) states, as far as they are known here: no copy of the paper is among the sources."""

from __future__ import annotations

CELLS: dict[str, tuple[int, int, int, float]] = {
    "BLIP-2 FlanT5": (12, 24, 8, 1.61),
    "BLIP-2 OPT": (15, 32, 8, 1.75),
    "LLaVA-1.5": (16, 32, 8, 1.85),
    "table 6, n = 16": (16, 24, 8, 1.42),
    "table 6, n = 21": (21, 24, 8, 1.17),
}
"""What is compared → n, L, d and the speed-up over plain decoding."""
