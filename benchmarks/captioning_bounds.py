"""What the weights alone allow heads of a decoder to gain, at the sizes of a paper and at those of a bundle.

Where a step takes as long as reading its weights does (one sequence, large matrices), K heads with a projection of their
own make every step longer by their share, whether they are right or not. Where a step takes as long as launching it does,
whatever it reads, K + 1 tokens a step is the only bound.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Of a GPT-2 with cross-attention, whose LM head is its embedding table."""

    width: int
    layers: int
    feed_forward: int
    vocabulary: int

    @property
    def step(self) -> int:
        """Weights that a step of plain decoding reads: of each layer self-attention (4 E²), queries and output of
        cross-attention (2 E²; its keys and values are of the picture) and feed-forward, and the LM head. Biases and norms
        are left out."""
        layer = 6 * self.width**2 + 2 * self.width * self.feed_forward
        return self.layers * layer + self.width * self.vocabulary

    @property
    def head(self) -> int:
        """Weights of one Medusa head: a residual block and a projection of its own."""
        return self.width**2 + self.width * self.vocabulary

    def bound(self, tokens: float, heads: int) -> float:
        """Highest speed-up by the weights, for `tokens` a step with so many heads; a wider pass is free here."""
        return tokens * self.step / (self.step + heads * self.head)


GPT2 = Sizes(768, 12, 3072, 50_257)
"""The decoder of nlpconnect/vit-gpt2-image-captioning."""

TINY = Sizes(128, 12, 384, 351)
"""The decoder of tiny-vit-gpt2."""
