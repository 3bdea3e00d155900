"""Whole checkpoints in quantized layouts, written by the documented formulas, with the numbers that they stand for.

Nothing of `exporter/checkpoint/layouts` has a part in it: numbers are drawn first, in numpy's integers, and packed after.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
LAYER = re.compile(r"(?<!blocks\.)\blayers\.\d+\.(self_attn|mlp)\.\w+\.weight$")
"""Matrices of a language model's layers; the tower's are left out, as publishers leave them out."""


@dataclass(frozen=True)
class Truth:
    """`codes` [out, in] from 0, `zeros` and `scales` [out, groups], the group of every input [in]."""

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    belongs: Tensor

    @property
    def values(self) -> Tensor:
        """float32 [out, in], by the formula."""
        own = self.belongs
        return (self.codes - self.zeros[:, own]).float() * self.scales.float()[:, own]


def quantized(weight: Tensor, bits: int, group: int, *, symmetric: bool, shuffled: bool = False) -> Truth:
    """Rounds a matrix; its inputs are shuffled over the groups where asked."""
    out, into = weight.shape
    belongs = torch.arange(into) // group
    if shuffled:
        belongs = belongs[torch.randperm(into, generator=torch.Generator().manual_seed(out + into))]
    scales, zeros = torch.empty(out, into // group, dtype=torch.float16), torch.empty(out, into // group)
    for number in range(into // group):
        own = weight[:, belongs == number].float()
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if symmetric:
            scales[:, number] = (torch.maximum(-low, high) / (2 ** (bits - 1) - 1)).half()
            zeros[:, number] = 2 ** (bits - 1)
        else:
            scales[:, number] = ((high - low) / (2**bits - 1)).half()
            zeros[:, number] = (-low / scales[:, number].float()).round().clamp(1, 2**bits - 1)
    codes = (weight.float() / scales.float()[:, belongs] + zeros[:, belongs]).round().clamp(0, 2**bits - 1)
    return Truth(codes.long(), zeros.long(), scales, belongs)


def packed(numbers: Tensor, bits: int) -> Tensor:
    """int32 [rows, ⌈n * bits / 32⌉] of [rows, n]: the first number in a word's lowest bits."""
    per = 32 // bits
    padded = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % per)).unflatten(1, (-1, per))
    words = sum(padded[..., i] << (bits * i) for i in range(per))
    return (words - ((words >> 31) << 32)).to(torch.int32).contiguous()  # type: ignore[operator, union-attr]


Stored = tuple[dict[str, Tensor], Tensor]


def _gptq(weight: Tensor, bits: int, *, symmetric: bool, shuffled: bool, less: int) -> Stored:
    truth = quantized(weight, bits, GROUP, symmetric=symmetric, shuffled=shuffled)
    return {
        "qweight": packed(truth.codes, bits).t().contiguous(),
        "qzeros": packed(truth.zeros.t() - less, bits),
        "scales": truth.scales.t().contiguous(),
        "g_idx": truth.belongs.to(torch.int32),
    }, truth.values


def _awq(weight: Tensor) -> Stored:
    truth = quantized(weight, 4, GROUP, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight outputs lies in the first, second, … nibble
    mixed = lambda numbers: packed(numbers.unflatten(1, (-1, 8))[..., order].flatten(1), 4)  # noqa: E731
    return {
        "qweight": mixed(truth.codes.t()),
        "qzeros": mixed(truth.zeros.t()),
        "scales": truth.scales.t().contiguous(),
    }, truth.values


def _compressed(weight: Tensor, bits: int, group: int | None, *, symmetric: bool) -> Stored:
    truth = quantized(weight, bits, group or weight.shape[1], symmetric=symmetric)
    stored = {
        "weight_packed": packed(truth.codes, bits),
        "weight_scale": truth.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = packed(truth.zeros.t(), bits).t().contiguous()
    return stored, truth.values


def _float8(weight: Tensor, block: int | None, end: str) -> Stored:
    out, into = weight.shape
    down, across = (1, into) if block is None else (block, block)
    scales = torch.empty(math.ceil(out / down), math.ceil(into / across), dtype=torch.bfloat16)
    stored, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(out, into)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            tile = slice(row * down, (row + 1) * down), slice(column * across, (column + 1) * across)
            scales[row, column] = weight[tile].abs().max() / 400
            stored[tile] = (weight[tile].float() / scales[row, column].float()).to(torch.float8_e4m3fn)
            values[tile] = stored[tile].float() * scales[row, column].float()
    return {"weight": stored, end: scales}, values


def _groups(form: str, **weights: Any) -> dict[str, Any]:
    """`config_groups` as llm-compressor writes them."""
    rows = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    own = {"type": "int", "symmetric": True, "dynamic": False, "actorder": None, "group_size": None} | weights
    group = {"targets": ["Linear"], "weights": own, "input_activations": rows if "float" in form else None}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:visual.*"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


_GPTQ = {"quant_method": "gptq", "group_size": GROUP, "true_sequential": True, "lm_head": False}
FORMS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "gptq": (
        _GPTQ | {"bits": 4, "sym": True, "desc_act": False},
        lambda w: _gptq(w, 4, symmetric=True, shuffled=False, less=1),
    ),
    "gptq-act-order": (
        _GPTQ | {"bits": 4, "sym": False, "desc_act": True},
        lambda w: _gptq(w, 4, symmetric=False, shuffled=True, less=1),
    ),
    "gptq-v2-int8": (
        _GPTQ | {"bits": 8, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
        lambda w: _gptq(w, 8, symmetric=False, shuffled=False, less=0),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        _awq,
    ),
    "w4a16": (
        _groups("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        lambda w: _compressed(w, 4, GROUP, symmetric=True),
    ),
    "w4a16-zero-points": (
        _groups("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
        lambda w: _compressed(w, 4, GROUP, symmetric=False),
    ),
    "w8a16": (
        _groups("pack-quantized", num_bits=8, strategy="channel"),
        lambda w: _compressed(w, 8, None, symmetric=True),
    ),
    "fp8-dynamic": (
        _groups("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda w: _float8(w, None, "weight_scale"),
    ),
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
        lambda w: _float8(w, 64, "weight_scale_inv"),
    ),
}  # fmt: skip
"""Name of a layout → its configuration, and what stores a matrix: (tensors by the ends of their names, values)."""


def write_quantized(plain: Path, folder: Path, form: str, part: str | None = None) -> dict[str, Tensor]:
    """Writes the checkpoint `plain` into `folder` with its layers' matrices in that form, and puts their values into
    `plain`, so that the two are the same model. `part`: the part of config.json that tells of it. Values by name."""
    folder.mkdir(parents=True)
    for path in plain.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    settings, store = FORMS[form]
    document = json.loads((folder / "config.json").read_text("utf-8"))
    (document if part is None else document[part])["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(document))
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if LAYER.search(name) and "visual" not in name:
            ends, values[name] = store(tensor)
            stored |= {f"{name.removesuffix('weight')}{end}": value for end, value in ends.items()}
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors | values, plain / "model.safetensors", metadata={"format": "pt"})
    return values
