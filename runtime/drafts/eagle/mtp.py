"""A model's own head for multi-token prediction: EAGLE's way of drafting, with a layer that came with the model.

Its features are what its own norm gives; the target's pass the final norm. It drafts from its own features again, as vLLM does.
"""

from __future__ import annotations

from typing import ClassVar

from .eagle import Eagle


class Mtp(Eagle):
    """The draft kind `mtp`."""

    role: ClassVar[str] = "mtp"
