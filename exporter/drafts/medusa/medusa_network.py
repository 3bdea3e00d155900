"""Heads that look several tokens ahead (Cai et al., Medusa, arXiv 2401.10774, section 2.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....runtime.common.errors import OptionError
from ..common.trained import check_width

HEADS = ("own", "shared", "trimmed")
MOST_HEADS, MOST_LAYERS, LARGEST = 16, 8, 10_000_000


@dataclass(frozen=True)
class MedusaConfig:
    """Shape of `MedusaHeads`; see there."""

    hidden_size: int
    vocab_size: int | None
    """None where the heads share the target's LM head, whatever that is."""
    heads: int = 4
    layers: int = 1
    head: str = "own"
    trimmed: int | None = None

    def __post_init__(self) -> None:
        check_width("Medusa", self.hidden_size)
        for name, most in (("heads", MOST_HEADS), ("layers", MOST_LAYERS), ("vocab_size", LARGEST)):
            value = getattr(self, name)
            if name == "vocab_size" and value is None and self.head == "shared":
                continue
            if type(value) is not int or not 1 <= value <= most:
                raise OptionError(f"Medusa: {name} {value!r:.40} is not in 1..{most}")
        if self.head not in HEADS:
            raise OptionError(f"unknown --head {self.head!r:.40}; choose one of {', '.join(HEADS)}")
        if (self.head == "trimmed") != (self.trimmed is not None):
            raise OptionError("Medusa: a trimmed vocabulary has a size, and only it has one")
        if self.trimmed is not None and (
            type(self.trimmed) is not int or not 1 <= self.trimmed <= (self.vocab_size or 0)
        ):
            raise OptionError(
                f"Medusa: a trimmed vocabulary of {self.trimmed!r:.40} of {self.vocab_size} tokens"
            )

    @property
    def proposed(self) -> int | None:
        """Tokens that a head chooses from."""
        return self.vocab_size if self.trimmed is None else self.trimmed


class ResBlock(nn.Module):
    """x + SiLU(W x + b), zero at the start: an untrained head says what the LM head says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[.., E] to [.., E]"""
        return hidden_states + F.silu(self.linear(hidden_states))


class MedusaHeads(nn.Module):
    """Head k reads what the LM head reads (hidden states after the final norm and scale) and says the token k further on.

    Each head is `layers` residual blocks, and a projection: of its `own` (a copy of the LM head at the start), the
    target's LM head (`shared`), or of its own over the `trimmed` most frequent tokens, whose ids are in `d2t`. Tensors
    are named as in the published checkpoints: `{k}.{j}.linear.weight`, `{k}.{j}.linear.bias`, `{k}.{layers}.weight`.
    """

    d2t: Tensor

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        for k in range(config.heads):
            parts: list[nn.Module] = [ResBlock(width) for _ in range(config.layers)]
            if config.head != "shared":
                parts.append(nn.Linear(width, config.proposed or 0, bias=False))
            self.add_module(str(k), nn.Sequential(*parts))
        if config.trimmed is not None:
            self.register_buffer("d2t", torch.arange(config.trimmed))

    @property
    def sequences(self) -> list[nn.Sequential]:
        """The heads in order."""
        return [self.get_submodule(str(k)) for k in range(self.config.heads)]  # type: ignore[misc]

    def start_from(self, lm_head: Tensor, d2t: Tensor | None = None) -> None:
        """Begin with the LM head's table [V, E], or its rows `d2t` int64 [trimmed]."""
        with torch.no_grad():
            if d2t is not None:
                self.d2t.copy_(d2t)
                lm_head = lm_head[d2t.to(lm_head.device)]
            for head in self.sequences if self.config.head != "shared" else []:
                head[-1].weight.copy_(lm_head)  # type: ignore[operator, union-attr]

    def blocks(self, k: int) -> nn.Sequential:
        """The residual blocks of head k."""
        return nn.Sequential(*list(self.sequences[k])[: self.config.layers])

    def forward(self, hidden_states: Tensor, lm_head: Tensor | None = None) -> Tensor:
        """Logits [.., heads, proposed] of hidden states [.., E]; `lm_head` [V, E] where the heads share it."""
        logits = []
        for k, head in enumerate(self.sequences):
            if self.config.head == "shared":
                assert lm_head is not None, "these heads share the LM head"
                logits.append(F.linear(self.blocks(k)(hidden_states), lm_head))
            else:
                logits.append(head(hidden_states))
        return torch.stack(logits, -2)
