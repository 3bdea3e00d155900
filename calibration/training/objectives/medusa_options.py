"""Options of Medusa heads, without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from ....runtime.errors import OptionError
from ..options import Options, option

HEADS = ("own", "shared", "trimmed")


@dataclass(frozen=True)
class MedusaOptions(Options):
    """How many heads, what each is made of, and how much a far one counts."""

    heads: int = option(4, "Heads: how many tokens are proposed after the next one.")
    head_layers: int = option(1, "Residual blocks of each head.")
    head: str = option(
        "own", "own: a copy of the LM head in each; shared: the LM head itself; trimmed: frequent tokens."
    )
    head_vocabulary: int = option(8192, "Tokens of a trimmed head, the most frequent in the data.")
    decay: float = option(0.8, "Head k counts decay^k.", flag="--head-decay")

    def __post_init__(self) -> None:
        self._at_least(1, "heads", "head_layers", "head_vocabulary")
        self._at_least(0, "decay", strictly=True)
        if self.head not in HEADS:
            raise OptionError(f"unknown --head {self.head!r:.40}; choose one of {', '.join(HEADS)}")
