"""Matrices as integers in blocks: error bounds, exact round trips, and the bytes that ONNX reads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vlmexport.exporter.drafts.common.draft_tensors import DraftTensors, dequantized
from vlmexport.exporter.graphs.dtypes import stored_bytes
from vlmexport.exporter.quantization.blocks import (
    BLOCK,
    LIMITS,
    PART,
    SMALLEST,
    dequantize,
    packed,
    quantizable,
    quantize,
    rows_together,
)
from vlmexport.exporter.quantization.matrix import QuantizedMatrix

matrices = st.builds(
    lambda seed, out, blocks, size: (
        torch.randn(out, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(-3, 3, blocks).repeat_interleave(BLOCK)
        * size
    ),
    st.integers(0, 2**32),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([1e-3, 1.0, 50.0]),
)
"""Blocks whose sizes are far apart, so that a scale of another block is no scale of theirs."""


def blocks(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.unflatten(1, (-1, BLOCK)).double()


@settings(max_examples=60, deadline=None)
@given(matrices, st.sampled_from(sorted(LIMITS)))
def test_block_error_is_within_rounding(matrix: torch.Tensor, dtype: str) -> None:
    integers, scales = quantize(matrix, dtype)
    limit = LIMITS[dtype]
    assert integers.dtype == torch.int8 and scales.dtype == torch.float32
    assert integers.shape == matrix.shape and scales.shape == (matrix.shape[0], matrix.shape[1] // BLOCK)
    assert -limit - 1 <= integers.min() and integers.max() <= limit and (scales > 0).all()
    found, wanted = blocks(dequantize(integers, scales)), blocks(matrix)
    usual = wanted.abs().amax(-1, keepdim=True).clamp(min=SMALLEST * limit) / limit
    rounded = (wanted / usual).round() * usual
    squares, bound = ((each - wanted).square().sum(-1) for each in (found, rounded))
    # An integer times its scale is rounded to float32: up to 127 × 2⁻²⁴ of a scale, where errors are 0.29 of one.
    assert (squares <= bound * (1 + 1e-4) + 1e-30).all()
    if dtype == "int8":  # nothing is clipped
        assert ((found - wanted).abs() <= usual * 0.5001).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(LIMITS)), st.integers(-12, 3))
def test_grid_values_round_trip(seed: int, dtype: str, power: int) -> None:
    """Integers times a power of two, the largest of each block among them, are what they were, bit for bit."""
    generator = torch.Generator().manual_seed(seed)
    limit = LIMITS[dtype]
    grid = torch.randint(-limit, limit + 1, (3, 2 * BLOCK), generator=generator)
    grid[:, ::BLOCK] = limit
    matrix = grid.float() * 2.0**power
    assert torch.equal(dequantize(*quantize(matrix, dtype)), matrix)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_clipping_pays_for_four_bits(seed: int) -> None:
    """A negative extreme is the integer −8: a block of one is exact, where symmetric rounding to 7 is not."""
    matrix = torch.randint(-7, 7, (1, BLOCK), generator=torch.Generator().manual_seed(seed)).float()
    matrix[0, 5] = -8
    integers, scales = quantize(matrix, "int4")
    assert integers.min() == -8
    torch.testing.assert_close(dequantize(integers, scales), matrix, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [32, 4096, 1 << 18])
def test_rows_of_any_width_are_rounded_in_parts_that_stay_in_a_cache(width: int) -> None:
    matrix = torch.randn(5, width, generator=torch.Generator().manual_seed(1))
    assert rows_together(matrix) == max(1, PART // width)
    integers, scales = quantize(matrix, "int4")
    for row in range(5):
        alone, own = quantize(matrix[row : row + 1], "int4")
        assert torch.equal(integers[row : row + 1], alone) and torch.equal(scales[row : row + 1], own)


def test_zeros_and_non_finite_values() -> None:
    zeros = torch.zeros(2, BLOCK)
    integers, scales = quantize(zeros, "int4")
    assert not integers.any() and (scales == SMALLEST).all() and scales.half().min() > 0
    broken = torch.ones(2, 2 * BLOCK)
    broken[1, 40] = torch.nan
    _, scales = quantize(broken, "int8")
    assert torch.isfinite(scales).tolist() == [[True, True], [True, False]]  # whoever stores it refuses it


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-8, 7), min_size=1, max_size=33))
def test_packed_bytes_are_those_of_onnx(values: list[int]) -> None:
    """ONNX's own reader of int4 gives the same numbers."""
    raw = packed(torch.tensor(values, dtype=torch.int8))
    assert raw.dtype == torch.uint8 and len(raw) == stored_bytes("int4", len(values))
    tensor = onnx.helper.make_tensor(
        "t", onnx.TensorProto.INT4, [len(values)], raw.numpy().tobytes(), raw=True
    )
    assert onnx.numpy_helper.to_array(tensor).astype(np.int8).tolist() == values


@pytest.mark.parametrize(
    ("shape", "fits"),
    [((4, 64), True), ((4, 48), False), ((64,), False), ((2, 2, 32), False), ((4, 0), False)],
)
def test_only_matrices_of_whole_blocks(shape: tuple[int, ...], fits: bool) -> None:
    assert quantizable(shape) == fits


def test_a_drafts_tensors_beside_what_they_become() -> None:
    """Norms, biases, ids and odd matrices stay; a matrix is there as integers and scales, in both ways of asking."""
    tensors = {
        "norm": torch.ones(64), "up.weight": torch.randn(6, 64), "odd.weight": torch.randn(6, 40), "d2t": torch.arange(64),
    }  # fmt: skip
    plain, light = DraftTensors("d", tensors), DraftTensors("d", tensors, "int4")
    assert plain.quantized == {} and light.quantized == {"draft.d.up.weight": QuantizedMatrix("int4")}
    assert "draft.d.up.weight/scales" not in plain and "draft.d.odd.weight/scales" not in light
    integers, scales = (light.read(f"draft.d.up.weight/{each}") for each in ("integers", "scales"))
    assert light.shape("draft.d.up.weight/scales") == scales.shape == (6, 2)
    assert light.shape("draft.d.up.weight/integers") == integers.shape == (6, 64)
    assert light.order("draft.d.up.weight/scales") == light.order("draft.d.up.weight")
    made = dequantized(tensors, "int4", torch.float32)
    assert made.keys() == {"up.weight"} and torch.equal(made["up.weight"], dequantize(integers, scales))
    halved = dequantized(tensors, "int4", torch.float16)["up.weight"]
    assert torch.equal(halved, dequantize(integers, scales.half()))
