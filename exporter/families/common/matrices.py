"""Which matrices of a model `--weights` stores as integers: those of its language model's layers, and its LM head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ....runtime.common.errors import OptionError
from ...quantization.blocks import BLOCK
from ...quantization.choice import HEAD, WeightsChoice, parse_weights
from ...quantization.matrix import QuantizedMatrix
from ...quantization.rounded import RoundedTensors

if TYPE_CHECKING:
    from ...checkpoint.checkpoint import Checkpoint
    from ..languages.base import Language
    from .base import Family


def linear_modules(language: Language) -> Iterator[tuple[str, nn.Module, bool]]:
    """(path in the language model's own class, module, whether its weight is [in, out]) of every linear module of its
    layers, those of a text encoder too."""
    for stack in language.stacks:
        yield from linears(language.model.get_submodule(stack), f"{stack}.")


def linears(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, bool]]:
    """(`prefix` and path, module, whether its weight is [in, out]) of every linear module in `root`."""
    for path, module in root.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield prefix + path, module, isinstance(module, Conv1D)


def quantized_matrices(language: Language, choice: WeightsChoice, block: int) -> dict[str, QuantizedMatrix]:
    """Tensors of the checkpoint → how they are stored. `block` inputs share a scale, fewer where a matrix has no whole
    number of such blocks; one without whole blocks of 32 stays float.

    OptionError for parts that no matrix has in its name, and for a tied table of 4 bits.
    """
    modules = list(linear_modules(language))
    choice.check_parts(path for path, _, _ in modules)
    matrices: dict[str, QuantizedMatrix] = {}

    def add(name: str, dtype: str | None, width: int, transposed: bool = False) -> None:
        own = math.gcd(width, block)
        if dtype is not None and own >= BLOCK:
            matrices[name] = QuantizedMatrix(dtype, own, transposed=transposed)

    for path, module, transposed in modules:
        weight: Any = module.weight
        name = language.named(path)(".weight")
        add(name, choice.dtype_of(path), weight.shape[0 if transposed else 1], transposed)
    head, tied = language.head.names[0], language.head.names == language.embedding.names
    if tied:
        choice.check_tied()
    add(head, choice.dtype_of(HEAD), language.head.shape[1])
    return matrices


def round_weights(
    checkpoint: Checkpoint, family: Family, weights: str | None, block: int, folder: Path | None = None
) -> None:
    """Lets the matrices of `checkpoint` that `weights` names be read as integers; `folder` is where those wait that were
    rounded. Of a quantized checkpoint, those integers stay that a bundle stores (`keep_integers`).

    OptionError for matrices that are integers already, and as `quantized_matrices`.
    """
    keep_integers(checkpoint, family.language)
    if weights is None:
        return
    matrices = quantized_matrices(family.language, parse_weights(weights), block)
    twice = sorted(matrices.keys() & checkpoint.tensors.quantized.keys())
    if twice:
        raise OptionError(
            f"--weights {weights}: {twice[0]} of {checkpoint.source} consists of integers already; leave the option out, or "
            "give float,head=int8 for a head of floats"
        )
    if matrices:
        checkpoint.tensors = RoundedTensors(checkpoint.tensors, matrices, folder)  # type: ignore[assignment]


def keep_integers(checkpoint: Checkpoint, language: Language) -> None:
    """Of a quantized checkpoint, leaves integers to the linear modules of the language model's layers and to its head; what
    else its publisher quantized is read as the floats that the integers stand for. So is a head that is the embedding
    table, too, unless it has 8 bits and no zero points: graphs read single tokens of it."""
    if not checkpoint.tensors.quantized:
        return
    names = {language.named(path)(".weight") for path, _, _ in linear_modules(language)}
    quantized = checkpoint.tensors.quantized  # only now: names say which matrices are [in, out]
    head = language.head.names[0]
    kind = quantized.get(head)
    simple = kind is not None and (kind.dtype, kind.zero_points, kind.order) == ("int8", False, False)
    if simple or head not in language.embedding.names:
        names.add(head)
    kept = {name: form for name, form in quantized.items() if name in names}
    checkpoint.tensors.quantized = kept  # type: ignore[misc]
