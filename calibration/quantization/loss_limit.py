"""Which matrices keep 8 bits so that the loss stays below a limit: chosen by sensitivity, decided by measurement."""

from __future__ import annotations

from collections.abc import Callable

from ...exporter.quantization.blocks import BLOCK
from ...runtime.common.errors import OptionError
from ..targets.target import Target
from .layerwise import Group, Integers, Quantized, Report
from .quality import Quality
from .rounding import round_matrix, scale_type

NARROW, WIDE = "int4", "int8"


def limit_loss(
    target: Target,
    quantized: Quantized,
    measure: Callable[[], Quality],
    most: float,
    block: int = BLOCK,
    report: Report = lambda line: None,
) -> list[Group]:
    """Gives as few groups as it takes 8 bits in place of 4, by rounding, so that the measured KL is at most `most`; those with
    the largest share of error for the bytes that they cost first. Returns them; target and `quantized` are changed.

    How many are needed is found by bisection, as if the loss fell with each. Raises OptionError that says what was reached
    where 8 bits everywhere are too few.
    """
    kl = measure().kl
    if kl <= most:
        return []
    groups = sorted(filter(lambda g: _narrow(quantized, g), quantized.groups), key=_gain, reverse=True)
    state = _Widened(target, quantized, groups, block)
    state.widen(len(groups))
    reached = measure().kl
    if reached > most:
        raise OptionError(
            f"--max-loss {most:g}: the KL to the float model is {reached:.4g} even with 8 bits in place of 4 everywhere; "
            "allow more, or keep parts of the model float (--weights int8,down_proj=float)"
        )
    few, enough = 0, len(groups)
    while enough - few > 1:
        middle = (few + enough) // 2
        state.widen(middle)
        kl = measure().kl
        report(f"KL {kl:.4g} with {middle} of {len(groups)} groups in 8 bits")
        few, enough = (few, middle) if kl <= most else (middle, enough)
    state.widen(enough)
    return groups[:enough]


def _narrow(quantized: Quantized, group: Group) -> bool:
    kinds = {quantized.integers[m.name].dtype for m in group.matrices if m.name in quantized.integers}
    return NARROW in kinds


def _gain(group: Group) -> float:
    """Share of error for each byte that 8 bits take more."""
    return max(group.errors.values()) / group.numbers


class _Widened:
    """The first so many groups in 8 bits, the others as they were."""

    def __init__(self, target: Target, quantized: Quantized, groups: list[Group], block: int) -> None:
        self._target, self._quantized, self._groups, self._block = target, quantized, groups, block
        self._before = dict(quantized.integers)
        self._count = 0

    def widen(self, count: int) -> None:
        for index in range(min(count, self._count), max(count, self._count)):
            for matrix in self._groups[index].matrices:
                before = self._before.get(matrix.name)
                if before is None or before.dtype != NARROW:
                    continue
                integers = before
                if index < count:
                    kind = scale_type(matrix.dtype)
                    original = matrix.original(self._target)
                    integers = Integers(WIDE, *round_matrix(original, WIDE, self._block, kind))
                self._quantized.integers[matrix.name] = integers
                matrix.write(integers.matrix())
        self._count = count
