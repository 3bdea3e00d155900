"""Floats of 8 bits with scales, which become floats of 32: by tensor, by output, by group of inputs, or by tile.

A weight is its float times its scale, also where the scale is called `weight_scale_inv`: the name means that of the step that
rounded it (DeepSeek-V3, inference/kernel.py, `weight_dequant`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ....runtime.common.errors import ExportError, UnsupportedModelError
from .layout import Layout
from .matrix import FLOATS, ROWS, Headers, Read, StoredMatrix, matrix_shape
from .settings import REMEDY, Settings

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SCALE_NAMES = ("weight_scale_inv", "weight_scale")
ROUNDED = (
    "the checkpoint's own engines round activations to floats of 8 bits; here they keep the bundle's precision, and the "
    "weights are exactly the checkpoint's."
)


@dataclass(frozen=True)
class Float8Matrix(StoredMatrix):
    """`parts` are the weight and its scales, one for every tile of `tile` outputs and inputs."""

    tile: tuple[int, int]

    def values(self, read: Read) -> Tensor:
        (out, into), (rows, columns) = self.shape, self.tile
        scales = read(self.parts[1]).float()
        if not bool(torch.isfinite(scales).all()):
            raise ExportError(f"tensor {self.parts[1]} is not finite; download it again")
        scales = scales.reshape(-1, math.ceil(into / columns)).repeat_interleave(rows, 0)[:out]
        weight, values = read(self.parts[0]), torch.empty(self.shape)
        for start in range(0, out, ROWS):
            own = scales[start : start + ROWS]
            own = own if columns == into else own.repeat_interleave(columns, 1)[:, :into]
            torch.mul(weight[start : start + ROWS].float(), own, out=values[start : start + ROWS])
        return values


def float8_matrix(headers: Headers, path: str, block: tuple[int, int] | None) -> Float8Matrix:
    """The matrix of floats of 8 bits at `path`. Raises ExportError where its scales are missing or do not fit."""
    weight = f"{path}.weight"
    shape = matrix_shape(headers, weight, FLOAT8)
    scale = next((name for end in SCALE_NAMES if (name := f"{path}.{end}") in headers), None)
    if scale is None:
        raise ExportError(
            f"tensor {weight} is {headers.dtype(weight)} without {path}.{SCALE_NAMES[-1]}; download it again"
        )
    if headers.dtype(scale) not in FLOATS:
        raise UnsupportedModelError(f"tensor {scale} is {headers.dtype(scale)}, which is not read; {REMEDY}")
    return Float8Matrix(path, shape, (weight, scale), _tile(headers, scale, shape, block))


def _tile(
    headers: Headers, scale: str, shape: tuple[int, int], block: tuple[int, int] | None
) -> tuple[int, int]:
    (out, into), found = shape, headers.shape(scale)
    if block is not None and found == (math.ceil(out / block[0]), math.ceil(into / block[1])):
        return block
    if math.prod(found) == 1 and block is None:
        return out, into
    if found in ((out,), (out, 1)) and block is None:
        return 1, into
    if len(found) == 2 and found[0] == out and found[1] and into % found[1] == 0 and block is None:
        return 1, into // found[1]
    tiles = "" if block is None else f" in blocks of {block[0]} × {block[1]}"
    raise ExportError(
        f"tensor {scale} {list(found)} does not fit a matrix of {list(shape)}{tiles}; download it again"
    )


def float8_paths(headers: Headers) -> list[str]:
    """Modules whose weight is a float of 8 bits. Raises ExportError where scales stand beside another weight."""
    paths = {
        name.removesuffix(".weight")
        for name in headers
        if name.endswith(".weight") and headers.dtype(name) in FLOAT8
    }
    for name in headers:
        path, _, own = name.rpartition(".")
        if own in SCALE_NAMES and path not in paths:
            raise ExportError(
                f"tensor {name} stands beside no {path}.weight of floats of 8 bits; download it again"
            )
    return sorted(paths)


@dataclass(frozen=True, kw_only=True)
class Float8Layout(Layout):
    """`block`: outputs and inputs of a tile; None where scales are of a whole tensor or output."""

    block: tuple[int, int] | None

    def matrices(self, headers: Headers) -> list[StoredMatrix]:
        return [float8_matrix(headers, path, self.block) for path in float8_paths(headers)]


def read_fp8(settings: Settings) -> Layout:
    """`quant_method` fp8, as DeepSeek and Qwen publish it and transformers writes it. Raises UnsupportedModelError for
    other floats than e4m3, and for experts of 4 bits."""
    if (kind := settings.text("fmt", "e4m3")) != "e4m3":
        raise settings.refuse(f"fmt={kind!r:.80} is not read, only e4m3")
    if (kind := settings.text("expert_dtype", "fp8")) != "fp8":
        raise settings.refuse(f"expert_dtype={kind!r:.80} is not read, only fp8")
    scheme = settings.text("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise settings.refuse(f"activation_scheme={scheme!r:.80} is not known")
    beside = ("input_scale", "activation_scale") if scheme == "static" else ()
    return Float8Layout(
        identity="fp8", notices=(ROUNDED,), beside=beside, block=settings.sizes("weight_block_size")
    )
