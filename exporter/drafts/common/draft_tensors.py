"""A draft's own tensors as a source of a bundle's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ...quantization.blocks import dequantize, quantizable, quantize
from ...quantization.matrix import SCALES, QuantizedMatrix, matrix_of, part_shape


class DraftTensors:
    """Tensors under names that cannot collide with the target's: `draft.` and the draft's name before each.

    With a `precision` ("int8", "int4") every matrix of whole blocks is there as its integers and its scales, too
    (`exporter/quantization/blocks.py`); `quantized` names them.
    """

    PREFIX = "draft."

    def __init__(self, draft: str, tensors: Mapping[str, torch.Tensor], precision: str | None = None) -> None:
        self.prefix = f"{self.PREFIX}{draft}."
        self._tensors = {self.prefix + k: v.detach() for k, v in tensors.items()}
        self.quantized: dict[str, QuantizedMatrix] = {}
        """Matrices that are integers."""
        if precision is not None:
            self.quantized = dict.fromkeys(matrices(self._tensors), QuantizedMatrix(precision))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or matrix_of(name) in self.quantized

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def order(self, name: str) -> tuple[int, int]:
        """After every shard of the target."""
        return 1_000_000, list(self._tensors).index(matrix_of(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        matrix = matrix_of(name)
        shape = tuple(self._tensors[matrix].shape)
        return part_shape(name, self.quantized[matrix], shape) if matrix in self.quantized else shape

    def read(self, name: str) -> torch.Tensor:
        """The tensor: float32, integers as int8 or int64."""
        if name in self._tensors:
            return self._tensors[name]
        matrix = matrix_of(name)
        integers, scales = quantize(self._tensors[matrix], self.quantized[matrix].dtype)
        return scales if name.endswith(SCALES) else integers


def matrices(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Those of a draft's tensors that a precision applies to: matrices of whole blocks. Norms, biases, ids and tables of
    more dimensions stay as they are."""
    return [name for name, value in tensors.items() if value.is_floating_point() and quantizable(value.shape)]


def dequantized(
    tensors: Mapping[str, torch.Tensor], precision: str, scales: torch.dtype
) -> dict[str, torch.Tensor]:
    """What a bundle that stores `tensors` in `precision`, and scales in the type `scales`, computes with: the matrices that
    change, float32."""
    weights = {}
    for name in matrices(tensors):
        integers, factors = quantize(tensors[name], precision)
        weights[name] = dequantize(integers, factors.to(scales))
    return weights
