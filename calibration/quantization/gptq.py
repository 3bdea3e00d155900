"""Integers that make up for each other (Frantar et al., GPTQ, arXiv 2210.17323, algorithm 1).

Inputs are rounded one after the other. The error of each is fed to the inputs that follow, as far as they can make up for it on
the calibration data. Pure functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...exporter.quantization.blocks import BLOCK, LIMITS, SMALLEST
from .rounding import narrowed

DAMPING = 0.01
"""Of the mean of the Hessian's diagonal, what is added to the diagonal; ten times as much as long as it has no inverse."""

LAZY = 4
"""Blocks whose errors reach the inputs behind them together: one product of matrices in place of four."""

SHRINKS = {"int8": (1.0,), "int4": (1.0, 0.97, 0.95, 0.92, 0.9, 0.875, 0.85, 0.82, 0.8, 0.77, 0.74, 0.7)}
"""Shares of the largest number that a scale is tried for: what rounding tries, and some between and below."""


def gptq(
    matrix: Tensor,
    hessian: Tensor,
    dtype: str,
    block: int = BLOCK,
    scales: torch.dtype = torch.float32,
    damping: float = DAMPING,
) -> tuple[Tensor, Tensor]:
    """(integers int8 [out, in], scales float32 [out, in / block], values of the type `scales`) of a float matrix [out, in].

    `hessian` float32 [in, in] is the sum, or any mean, of x xᵀ over inputs x of the matrix. The scales of a block are chosen when the
    errors of all blocks before have been fed to it: by the error that inputs behind a number cannot make up for.
    """
    return fed(matrix, feeding(hessian, damping), dtype, block, scales)


def feeding(hessian: Tensor, damping: float = DAMPING) -> Tensor:
    """The upper Cholesky factor [in, in] of the inverse of the damped Hessian: row i says how the error of input i is fed to
    the inputs behind it. An input that was never seen gets and gives nothing.

    Raises ValueError for a Hessian with a number that is not finite.
    """
    if not hessian.isfinite().all():
        raise ValueError("the Hessian holds a number that is not finite")
    diagonal = hessian.diagonal()
    unseen = diagonal <= 0
    mean = float(diagonal.mean()) or 1.0
    share = damping
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(share * mean).masked_fill_(unseen, mean)
        lower, problem = torch.linalg.cholesky_ex(damped)
        if not problem:
            upper, problem = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not problem and upper.isfinite().all():
                return upper
        share *= 10


def fed(
    matrix: Tensor, factor: Tensor, dtype: str, block: int = BLOCK, scales: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """As `gptq`, with the `factor` that `feeding` made of the Hessian."""
    limit = LIMITS[dtype]
    rest = matrix.detach().float().T.contiguous()  # [in, out]: an input's weights lie side by side
    inputs, outputs = rest.shape
    integers = torch.empty(inputs, outputs, dtype=torch.int8, device=rest.device)
    kept = torch.empty(inputs // block, outputs, device=rest.device)
    errors = torch.empty(LAZY * block, outputs, device=rest.device)
    diagonal = factor.diagonal()
    costs, divisors = diagonal.square().reciprocal(), diagonal.tolist()
    for first in range(0, inputs, LAZY * block):
        last = min(first + LAZY * block, inputs)
        for start in range(first, last, block):
            end = start + block
            best = _scales(rest[start:end], costs[start:end], dtype)
            scale = kept[start // block] = narrowed(best, scales)
            for i in range(start, end):
                rounded = torch.div(rest[i], scale).round_().clamp_(-limit - 1, limit)
                integers[i] = rounded
                error = torch.addcmul(rest[i], rounded, scale, value=-1, out=errors[i - first])
                error /= divisors[i]
                rest[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
            rest[end:last].addmm_(
                factor[start:end, end:last].T, errors[start - first : end - first], alpha=-1
            )
        rest[last:].addmm_(factor[first:last, last:].T, errors[: last - first], alpha=-1)
    return integers.T.contiguous(), kept.T.contiguous()


def _scales(rows: Tensor, costs: Tensor, dtype: str) -> Tensor:
    """Scales [out] of one block, weights [inputs, out]: those with the least squared error, each input's times its cost [inputs]."""
    limit = LIMITS[dtype]
    peak = rows.abs().amax(0)
    least = torch.full_like(peak, torch.inf)
    best = torch.empty_like(peak)
    for shrink in SHRINKS[dtype]:
        scale = (peak * (shrink / limit)).clamp_(min=SMALLEST)
        rounded = (rows / scale).round_().clamp_(-limit - 1, limit)
        error = costs @ torch.addcmul(rows, rounded, scale, value=-1).square_()
        better = error < least
        least, best = torch.where(better, error, least), torch.where(better, scale, best)
    return best
