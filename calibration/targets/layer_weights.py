"""What a pass over one token reads of a decoder: the numbers of its weights, by sublayer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ...exporter.families.common.layer_skip import Sublayers, attention_of
from .target import Target


@dataclass(frozen=True)
class Weights:
    """Numbers of the weights of attention and of the rest (MLP and norms) by layer, and of the LM head."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    head: int

    @classmethod
    def of(cls, target: Target) -> Weights:
        """Of a target's decoder. What makes keys and values of an encoder's hidden states is read once in a request: it does not
        count."""
        language = target.family.language
        attention: list[int] = []
        rest: list[int] = []
        for layer in target.layers:
            whole = _numbers([layer])
            own = _numbers(attention_of(language, layer))
            once = _numbers([layer.get_submodule(path) for path in language.source_paths])
            attention.append(own - once)
            rest.append(whole - own)
        return cls(tuple(attention), tuple(rest), _numbers([target.lm_head]))

    @property
    def whole(self) -> int:
        """Numbers that a token of the target reads."""
        return self.kept(Sublayers()) + self.head

    def kept(self, skip: Sublayers) -> int:
        """Numbers that are left of the layers without `skip`."""
        sides = ((self.attention, skip.attention), (self.mlp, skip.mlp))
        return sum(n for side, out in sides for layer, n in enumerate(side) if layer not in out)

    def share(self, skip: Sublayers) -> float:
        """Of a drafted token, of what a token of the target reads; the head is read for both."""
        return (self.kept(skip) + self.head) / self.whole

    def first_layers(self, count: int) -> float:
        """`share` of an early exit after `count` layers."""
        rest = tuple(range(count, len(self.mlp)))
        return self.share(Sublayers(rest, rest))

    def exit_with(self, count: int, network: nn.Module) -> float:
        """`share` of an exit after `count` layers whose hidden states pass a network."""
        return self.first_layers(count) + _numbers([network]) / self.whole


def _numbers(modules: Sequence[nn.Module]) -> int:
    """How many parameters these have together."""
    return sum(value.numel() for module in modules for value in module.parameters())
