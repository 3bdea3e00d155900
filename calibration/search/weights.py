"""What a pass over one token reads of a decoder: the numbers of its weights, by sublayer."""

from __future__ import annotations

from dataclasses import dataclass

from ...exporter.families.skipping import Sublayers, attention_of
from ..targets.target import Target


@dataclass(frozen=True)
class Weights:
    """Numbers of the weights of attention and of the rest (MLP and norms) by layer, and of the LM head."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    head: int

    @classmethod
    def of(cls, target: Target) -> Weights:
        """Of a target's decoder. What makes keys and values of an encoder's rows is read once in a request: it does not
        count."""
        language, attention, rest = target.family.language, [], []
        for layer in target.layers:
            whole = sum(value.numel() for value in layer.parameters())
            own = sum(p.numel() for module in attention_of(language, layer) for p in module.parameters())
            once = sum(
                p.numel() for path in language.source_paths for p in layer.get_submodule(path).parameters()
            )
            attention.append(own - once)
            rest.append(whole - own)
        return cls(tuple(attention), tuple(rest), target.lm_head.weight.numel())

    def kept(self, skip: Sublayers) -> int:
        """Numbers that are left of the layers without `skip`."""
        sides = ((self.attention, skip.attention), (self.mlp, skip.mlp))
        return sum(n for side, out in sides for layer, n in enumerate(side) if layer not in out)

    def share(self, skip: Sublayers) -> float:
        """Of a drafted token, of what a token of the target reads; the head is read for both."""
        return (self.kept(skip) + self.head) / (self.kept(Sublayers()) + self.head)

    def first_layers(self, count: int) -> float:
        """`share` of an early exit after `count` layers."""
        rest = tuple(range(count, len(self.mlp)))
        return self.share(Sublayers(rest, rest))
