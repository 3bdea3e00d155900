"""Published speed-ups beside what arithmetic allows: `python -m benchmarks.papers_bounds` prints the tables of docs/results/papers/bounds.md.

Everything is taken in a method's favour: a pass takes as long as reading its weights, a wider pass is free, heads and
networks of a self-draft are free, and whatever is not named costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from benchmarks.published_fastvlm import CELLS
from benchmarks.published_vispec import COMPARISON


@dataclass(frozen=True)
class Exit:
    """A self-draft after n of L layers, d tokens a cycle."""

    layer: int
    layers: int
    length: int

    @property
    def cycle(self) -> float:
        """In passes of the whole model: n/L of it per drafted token, and once all of it."""
        return self.length * self.layer / self.layers + 1

    @property
    def bound(self) -> float:
        """Highest speed-up, every drafted token right."""
        return (self.length + 1) / self.cycle

    @property
    def limit(self) -> float:
        """The same for chains of any length: below L/n."""
        return self.layers / self.layer

    def needed(self, speedup: float) -> float | None:
        """The alpha at which chains of d tokens reach `speedup`; None where no alpha does."""
        tokens = speedup * self.cycle
        if tokens > self.length + 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if kept(middle, self.length) < tokens else (low, middle)
        return high


def kept(alpha: float, length: int) -> float:
    """Tokens that a cycle keeps, the bonus included, at an acceptance that is the same everywhere (Leviathan et al.)."""
    return sum(alpha**i for i in range(length + 1))


@dataclass(frozen=True)
class Llama:
    """Weights of a Llama, biases and norms left out."""

    width: int
    layers: int
    feed_forward: int
    vocabulary: int
    group: int = 1
    """Heads of queries that share one of keys and values."""

    @property
    def layer(self) -> int:
        """Attention 2 E² + 2 E² / group, feed-forward 3 E F."""
        attention = 2 * self.width**2 + 2 * self.width**2 // self.group
        return attention + 3 * self.width * self.feed_forward

    @property
    def head(self) -> int:
        return self.width * self.vocabulary

    @property
    def step(self) -> int:
        """What plain decoding reads."""
        return self.layers * self.layer + self.head

    @property
    def eagle_step(self) -> int:
        """What a pass of an EAGLE layer reads: the layer, a matrix 2E × E, and the LM head."""
        return self.layer + 2 * self.width**2 + self.head

    @property
    def draft_step(self) -> int:
        """What a pass of a ViSpec layer reads: as EAGLE's, and one more such matrix."""
        return self.eagle_step + 2 * self.width**2

    @property
    def medusa_step(self) -> int:
        """What ViSpec's authors' Medusa reads: five heads E × E, and the LM head for all of them."""
        return 5 * self.width**2 + self.head

    def drafting(self, method: str) -> float:
        """What a cycle of a published method reads to draft, in steps of plain decoding."""
        reads = {
            "Medusa": self.medusa_step,
            "EAGLE-2": PASSES * self.eagle_step,
            "ViSpec": PASSES * self.draft_step,
        }
        return reads[method] / self.step


VICUNA_7B, VICUNA_13B = Llama(4096, 32, 11_008, 32_000), Llama(5120, 40, 13_824, 32_000)
SIZES = {
    "LLaVA-1.6 7B": VICUNA_7B,
    "LLaVA-1.6 13B": VICUNA_13B,
    "Qwen2.5-VL 3B": Llama(2048, 36, 11_008, 151_936, group=8),
    "Qwen2.5-VL 7B": Llama(3584, 28, 18_944, 152_064, group=7),
}
FASTVLM = [(12, 24), (13, 32), (15, 32), (16, 32)]
PUBLISHED = (1.55, 1.85)
VISPEC, PASSES = 3.22, 4  # its highest; a tree of depth 3 begins with a pass of its own
MOST_TOKENS = PASSES + 1


def fastvlm() -> Iterator[str]:
    """Rows of a Markdown table."""
    yield "| n of L | d | bound, every token right | any d: below | alpha that 1.55 × takes | alpha that 1.85 × takes |"
    yield "|---|---|---|---|---|---|"
    for layer, layers in FASTVLM:
        for length in (5, 8):
            one = Exit(layer, layers, length)
            needs = ["impossible" if a is None else f"{a:.2f}" for a in map(one.needed, PUBLISHED)]
            yield f"| {layer} of {layers} | {length} | {one.bound:.2f} × | {one.limit:.2f} × | {needs[0]} | {needs[1]} |"


def cells() -> Iterator[str]:
    """Rows of a Markdown table: speed-ups that FastVLM states, beside what n, L and d allow."""
    yield "| FastVLM states for | n of L | d | speed-up | bound, every token right | any d: below | alpha that it takes |"
    yield "|---|---|---|---|---|---|---|"
    for name, (layer, layers, length, speedup) in CELLS.items():
        one = Exit(layer, layers, length)
        alpha = one.needed(speedup)
        needs = "**impossible**" if alpha is None else f"{alpha:.2f}"
        yield (
            f"| {name} | {layer} of {layers} | {length} | {speedup:.2f} × | {one.bound:.2f} × | {one.limit:.2f} × | {needs} |"
        )


def vispec() -> Iterator[str]:
    """Rows of a Markdown table."""
    yield "| sizes of | a drafting pass, of a step | bound, 5 tokens a cycle | tokens a cycle that 3.22 × takes |"
    yield "|---|---|---|---|"
    for name, sizes in (("Vicuna-7B", VICUNA_7B), ("Vicuna-13B", VICUNA_13B)):
        cycle = 1 + PASSES * sizes.draft_step / sizes.step
        share = sizes.draft_step / sizes.step
        yield f"| {name} | {share:.3f} | {MOST_TOKENS / cycle:.2f} × | {VISPEC * cycle:.2f} |"


def comparison() -> Iterator[str]:
    """Rows of a Markdown table: ViSpec's main comparison. Of every model, temperature and method the means over the tasks, and
    how many of them state a speed-up above what weights allow at their tau, and above tau + 1, which is drafting for nothing."""
    yield "| model | T | method | tau | speed-up | bound by weights | above it | above tau + 1 |"
    yield "|---|---|---|---|---|---|---|---|"
    for (model, temperature, method), cells in COMPARISON.items():
        cycle = 1 + SIZES[model].drafting(method)
        tau, speedup = (mean(values) for values in zip(*cells, strict=True))
        above = sum(stated > (1 + accepted) / cycle for accepted, stated in cells)
        free = sum(stated > 1 + accepted for accepted, stated in cells)
        yield (
            f"| {model} | {temperature} | {method} | {tau:.2f} | {speedup:.2f} × | {(1 + tau) / cycle:.2f} × | {above} of {len(cells)} "
            f"| {free} of {len(cells)} |"
        )


if __name__ == "__main__":
    print("\n".join([*fastvlm(), "", *cells(), "", *vispec(), "", *comparison()]))
