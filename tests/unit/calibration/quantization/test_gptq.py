"""GPTQ over blocks of integers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vlmexport.calibration.quantization.gptq import feeding, gptq
from vlmexport.calibration.quantization.rounding import nearest, round_matrix
from vlmexport.exporter.quantization.blocks import LIMITS, dequantize


def correlated(rows: int, width: int, seed: int = 0) -> Tensor:
    """Inputs [rows, width] that say much about each other."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, width // 8, generator=generator)
    return few @ torch.randn(width // 8, width, generator=generator) + 0.3 * torch.randn(
        rows, width, generator=generator
    )


def weights(out: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed))


def output_error(matrix: Tensor, integers: Tensor, scales: Tensor, inputs: Tensor) -> float:
    return float((inputs @ (matrix - dequantize(integers, scales)).T).square().sum())


def dense(matrix: Tensor, hessian: Tensor, scales: Tensor, dtype: str, block: int, damping: float) -> Tensor:
    """Integers by the update of Optimal Brain Surgeon, in float64, from the inverse of the Hessian of what is left at every step
    (section 3 of the paper, equation 2), with given scales."""
    left = matrix.double().clone()
    total = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    limit = LIMITS[dtype]
    integers = torch.zeros_like(matrix, dtype=torch.int8)
    for i in range(matrix.shape[1]):
        inverse = torch.linalg.inv(total[i:, i:])
        scale = scales[:, i // block].double()
        rounded = (left[:, i] / scale).round().clamp(-limit - 1, limit)
        integers[:, i] = rounded.to(torch.int8)
        error = (left[:, i] - rounded * scale) / inverse[0, 0]
        left[:, i:] -= error[:, None] * inverse[0]
    return integers


@pytest.mark.parametrize("dtype", ["int4", "int8"])
@pytest.mark.parametrize("width", [96, 320])
def test_outputs_are_closer_than_by_rounding(dtype: str, width: int):
    inputs, matrix = correlated(400, width), weights(48, width)

    ours = output_error(matrix, *gptq(matrix, inputs.T @ inputs, dtype), inputs)
    rounded = output_error(matrix, *round_matrix(matrix, dtype), inputs)

    assert ours < 0.5 * rounded


def test_unrelated_inputs_are_rounded_to_the_nearest():
    """In int8, where both try one scale, as by `round_matrix`; in int4 with scales that are at least as good."""
    matrix = weights(40, 160)

    for dtype in ("int4", "int8"):
        integers, scales = gptq(matrix, torch.eye(160), dtype)
        by_rounding, best = round_matrix(matrix, dtype)
        assert torch.equal(integers, nearest(matrix, scales, dtype))
        ours, theirs = dequantize(integers, scales), dequantize(by_rounding, best)
        assert (matrix - ours).square().sum() <= (matrix - theirs).square().sum() * (1 + 1e-6)
    assert torch.equal(integers, by_rounding)
    assert torch.equal(scales, best)


@pytest.mark.parametrize("block", [32, 16])
def test_integers_are_those_of_an_independent_dense_implementation(block: int):
    """With blocks that end within, and behind, those that are fed lazily."""
    inputs, matrix = correlated(300, 160), weights(24, 160)
    hessian = inputs.T @ inputs

    integers, scales = gptq(matrix, hessian, "int4", block)
    expected = dense(matrix, hessian, scales, "int4", block, 0.01)

    different = (integers != expected).float().mean()
    assert different < 0.002  # a number halfway between two integers falls by the last bit of float32
    assert not torch.equal(integers, round_matrix(matrix, "int4", block)[0])


def test_an_input_that_was_never_seen_is_rounded_and_feeds_nothing():
    inputs, matrix = correlated(200, 64), weights(16, 64)
    inputs[:, 5] = 0
    inputs[:, 40] = 0

    integers, scales = gptq(matrix, inputs.T @ inputs, "int8")

    factor = feeding(inputs.T @ inputs)
    for unseen in (5, 40):
        assert not factor[unseen, unseen + 1 :].any()
        assert not factor[:unseen, unseen].any()
    assert torch.equal(integers[:, 5], nearest(matrix, scales, "int8")[:, 5])


def test_a_hessian_without_an_inverse_is_damped_more():
    """More inputs than records, and not even positive semidefinite by rounding."""
    inputs, matrix = correlated(10, 64), weights(16, 64)
    hessian = inputs.T @ inputs
    hessian -= 0.05 * hessian.diagonal().mean() * torch.eye(64)

    integers, scales = gptq(matrix, hessian, "int4")

    assert scales.isfinite().all() and (scales > 0).all()
    assert (matrix - dequantize(integers, scales)).abs().max() < 3 * matrix.abs().max()


def test_a_hessian_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        feeding(torch.full((32, 32), torch.nan))


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16])
def test_scales_are_values_of_the_stored_type_before_integers_are_chosen(scales: torch.dtype):
    inputs, matrix = correlated(200, 64), weights(16, 64) * 1e-3

    for integers, kept in (
        gptq(matrix, inputs.T @ inputs, "int8", scales=scales),
        round_matrix(matrix, "int8", scales=scales),
    ):
        assert torch.equal(kept.to(scales).float(), kept)
        # Half a step for most; a scale that was rounded down cuts the largest by a little more.
        assert ((matrix - dequantize(integers, kept)).abs() <= 40 * kept.repeat_interleave(32, 1)).all()
    integers, kept = round_matrix(matrix, "int8", scales=scales)
    off = (matrix - dequantize(integers, kept)).abs() / kept.repeat_interleave(32, 1)
    assert off.quantile(0.95) <= 0.5
