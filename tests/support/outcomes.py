"""The exact law of what a random program returns: every uniform is an interval, and every comparison splits one.

`Sampling.uniform` hands out unknowns in place of numbers, and `draw` asks them. A run decides each question one way;
runs are repeated until all ways have been gone, and each counts with the share of the uniforms that lead there. The
same unknown asked twice answers consistently, so shared and left-over uniforms are treated as they are.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import pytest
from vlmexport.runtime.sampling import sampler
from vlmexport.runtime.sampling.sampler import Sampling

Outcome = TypeVar("Outcome", bound=Hashable)


class Unknown:
    """A uniform of which is known that it lies in [low, high)."""

    def __init__(self, run: _Run) -> None:
        self._run, self.low, self.high = run, Fraction(0), Fraction(1)

    def split(self, bounds: list[Fraction]) -> int:
        """In which of the intervals between rising bounds (0 first, 1 last) it lies; it is known from now on."""
        ways = []
        for at, (low, high) in enumerate(itertools.pairwise(bounds)):
            low, high = max(low, self.low), min(high, self.high)
            if low < high:
                ways.append((at, low, high))
        at, low, high = ways[self._run.decide(len(ways))]
        self._run.share *= (high - low) / (self.high - self.low)
        self.low, self.high = low, high
        return at

    def __mul__(self, factor: float) -> _Scaled:
        return _Scaled(self, Fraction(float(factor)))


class _Scaled:
    def __init__(self, unknown: Unknown, factor: Fraction) -> None:
        self._unknown, self._factor = unknown, factor

    def __lt__(self, bound: float) -> bool:
        if not self._factor:
            return bound > 0
        edge = min(Fraction(1), Fraction(float(bound)) / self._factor)
        return self._unknown.split([Fraction(0), edge, Fraction(1)]) == 0


class _Run:
    """One way through all questions: the first ones as `script` says, the others the first way."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.ways, self.share = script, [], Fraction(1)
        self.unknowns: dict[tuple[int, ...], Unknown] = {}

    def decide(self, ways: int) -> int:
        at = len(self.ways)
        self.ways.append(ways)
        if at == len(self.script):
            self.script.append(0)
        return self.script[at]

    def uniform(self, asked: Sampling, index: int, stream: int = 0) -> Unknown:
        return self.unknowns.setdefault((asked.seed, stream, index), Unknown(self))


def _drawn(weights: np.ndarray, uniform: Unknown) -> int:
    """`draw`, exactly."""
    shares = [Fraction(float(weight)) for weight in weights]
    total, bounds = sum(shares), [Fraction(0)]
    for share in shares:
        bounds.append(bounds[-1] + share / total)
    return uniform.split(bounds)


def exact_law(program: Callable[[], Outcome]) -> dict[Outcome, Fraction]:
    """Probability of every outcome of `program`, which is a function of its uniforms."""
    law: dict[Outcome, Fraction] = defaultdict(Fraction)
    script: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = sampler.draw
        for module in [m for name, m in sys.modules.items() if name.startswith("vlmexport.runtime.")]:
            if getattr(module, "draw", None) is original:
                patch.setattr(module, "draw", _drawn)
        run: Any = None
        patch.setattr(Sampling, "uniform", lambda asked, index, stream=0: run.uniform(asked, index, stream))
        while True:
            run = _Run(script)
            law[program()] += run.share
            script = run.script[: len(run.ways)]
            while script and script[-1] + 1 == run.ways[len(script) - 1]:
                script.pop()
            if not script:
                break
            script[-1] += 1
    assert sum(law.values()) == 1
    return dict(law)
