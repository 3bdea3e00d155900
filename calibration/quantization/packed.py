"""A checkpoint folder with integers in the layout `pack-quantized` of the library compressed-tensors (its
`compressors/pack_quantized`), which vLLM and transformers read.

In place of a matrix `M.weight` stand `M.weight_packed` int32 [out, in · bits / 32], the first input in the lowest bits and each
integer stored plus 2^(bits − 1); `M.weight_scale` [out, in / block] in the type of the weight; and `M.weight_shape` int64 [2], out
and in. Also where the weight was stored [in, out] (GPT-2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...exporter.checkpoint import Checkpoint
from ...exporter.checkpoint.changed import copy_small, write_tensors
from ...exporter.checkpoint.origin import QUANTIZED, Origin
from ...exporter.quantization.blocks import BLOCK
from ...runtime.common.atomic_files import atomic_write
from ...runtime.common.bounded_files import read_json
from ...runtime.common.errors import ExportError
from .layerwise import Integers
from .matrices import Matrix

BITS = {"int4": 4, "int8": 8}
CONFIG, REPORT = "config.json", "quantization.json"
ADAPTER = "adapter_config.json"
"""Of an adapter beside the model: it is in the weights now."""
LARGEST = 16 << 20
"""Bytes of a configuration."""


def pack(integers: Tensor, bits: int) -> Tensor:
    """Int32 [out, in · bits / 32] of signed integers int8 [out, in]."""
    each = 32 // bits
    values = integers.to(torch.int32).unflatten(1, (-1, each)) + (1 << bits - 1)
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (values << shifts).sum(-1, dtype=torch.int32)


class PackedTensors:
    """A checkpoint's tensors with matrices as packed integers, as `write_tensors` takes them."""

    def __init__(self, checkpoint: Checkpoint, integers: Mapping[str, Integers]) -> None:
        """`integers` by the name on disk of the matrix's tensor, which ends in `weight`."""
        self._files, self._integers = checkpoint.tensors, integers
        self._names: dict[str, tuple[str, str]] = {}
        for tensor in self._files:
            parts = ("_packed", "_scale", "_shape") if tensor in integers else ("",)
            self._names |= {tensor + part: (tensor, part) for part in parts}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def read(self, name: str) -> Tensor:
        """A tensor as it is written."""
        tensor, part = self._names[name]
        if not part:
            return self._files.read(tensor)
        matrix = self._integers[tensor]
        if part == "_packed":
            return pack(matrix.values.cpu(), BITS[matrix.dtype])
        if part == "_shape":
            return torch.tensor(matrix.values.shape)
        stored = getattr(torch, self._files.dtype(tensor))
        return matrix.scales.to("cpu", torch.float32 if stored == torch.float64 else stored)

    def bytes(self, name: str) -> int:
        """What it takes on disk."""
        tensor, part = self._names[name]
        item = getattr(torch, self._files.dtype(tensor)).itemsize
        if not part:
            return torch.Size(self._files.shape(tensor)).numel() * item
        matrix = self._integers[tensor]
        if part == "_packed":
            return matrix.values.numel() * BITS[matrix.dtype] // 8
        return 16 if part == "_shape" else matrix.scales.numel() * min(item, 4)

    def bytes_of(self, tensor: str) -> int:
        """What all parts of one of the checkpoint's tensors take."""
        return sum(self.bytes(name) for name, (own, _) in self._names.items() if own == tensor)


def quantization_config(
    matrices: Iterable[Matrix], integers: Mapping[str, Integers], ignore: Sequence[str], block: int = BLOCK
) -> dict[str, Any]:
    """The `quantization_config` of a configuration: `integers` by the name of the matrix; modules in `ignore` are float."""
    kinds: dict[str, set[str]] = {}
    every: dict[str, set[str]] = {}
    for matrix in matrices:
        # vLLM goes by the names on disk, transformers by those in its class.
        for name in (matrix.name, matrix.tensor.removesuffix(".weight")):
            template, number = _numbered(name)
            every.setdefault(template, set()).add(number)
            if matrix.name in integers:
                kinds.setdefault(integers[matrix.name].dtype, set()).add(name)
    groups = {}
    for index, kind in enumerate(name for name in BITS if name in kinds):
        weights = {
            "num_bits": BITS[kind], "type": "int", "symmetric": True, "strategy": "group", "group_size": block,
            "dynamic": False,
        }  # fmt: skip
        groups[f"group_{index}"] = {
            "targets": _targets(kinds[kind], every), "weights": weights, "input_activations": None,
            "output_activations": None, "format": "pack-quantized",
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(ignore),
    }


def write_packed(
    folder: Path,
    checkpoint: Checkpoint,
    tensors: PackedTensors,
    quantization: Mapping[str, Any],
    origin: Origin,
    report: Mapping[str, Any],
) -> None:
    """Writes all files into `folder`, which is there."""
    copy_small(folder, checkpoint, without=(CONFIG, ADAPTER, REPORT, QUANTIZED))
    config = read_json(checkpoint.folder / CONFIG, LARGEST, ExportError)
    _write_json(folder / CONFIG, {**config, "quantization_config": quantization})  # type: ignore[dict-item]
    _write_json(folder / REPORT, report)
    origin.write(folder, QUANTIZED)
    write_tensors(folder, tensors)


def _write_json(path: Path, document: Any) -> None:
    with atomic_write(path) as out:
        out.write((json.dumps(document, indent=1) + "\n").encode())


def _numbered(name: str) -> tuple[str, str]:
    """A name with its layer's number left out (the first number between dots), and that number."""
    found = re.search(r"(?<=\.)\d+(?=\.)", name)
    return (name, "") if found is None else (f"{name[: found.start()]}#{name[found.end() :]}", found[0])


def _targets(names: set[str], every: Mapping[str, set[str]]) -> list[str]:
    """`names` as patterns: one for the modules that differ in the number of their layer."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        template, number = _numbered(name)
        numbers.setdefault(template, set()).add(number)
    targets = []
    for template, own in sorted(numbers.items()):
        if own == {""}:
            targets.append(template)
            continue
        some = r"\d+" if own == every[template] else f"(?:{'|'.join(sorted(own, key=int))})"
        targets.append(f"re:^{re.escape(template).replace(re.escape('#'), some)}$")
    return targets
