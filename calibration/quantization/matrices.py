"""Which matrices of a target can become integers: those of linear modules in the layers of its language model, and its LM head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...exporter.families.common.matrices import linears
from ...exporter.quantization.blocks import quantizable
from ..targets.target import Target


@dataclass(frozen=True)
class Matrix:
    """The weights of one linear module as a matrix [out, in].

    `name` is the module's in the model's class, `tensor` the name on disk of its weights, which are stored as `dtype`, and
    [in, out] where `transposed` (GPT-2's).
    """

    name: str
    module: nn.Module
    tensor: str
    dtype: torch.dtype
    transposed: bool = False

    def read(self) -> Tensor:
        """The matrix float32 [out, in] as the module has it now."""
        weight = self.module.weight.detach()  # type: ignore[operator]
        return weight.T if self.transposed else weight  # type: ignore[return-value]

    @torch.no_grad()
    def write(self, matrix: Tensor) -> None:
        """Gives the module another matrix [out, in]."""
        self.module.weight.copy_(matrix.T if self.transposed else matrix)  # type: ignore[operator]

    def original(self, target: Target) -> Tensor:
        """The matrix [out, in] of the checkpoint, in float32, where the model is."""
        weight = target.checkpoint.tensors.read(self.tensor).to(target.device).float()
        return weight.T if self.transposed else weight

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        rows, columns = self.read().shape
        return rows, columns

    @property
    def numbers(self) -> int:
        """How many it has."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Stack:
    """Layers that follow each other, the path of each in the model, and its matrices."""

    layers: nn.ModuleList
    paths: tuple[str, ...]
    matrices: tuple[tuple[Matrix, ...], ...]


def stacks(target: Target) -> list[Stack]:
    """The blocks of a text encoder where there is one, then the decoder's layers, in the order in which they compute."""
    parts = target.family.parts(target.model)
    names = {id(module): name for name, module in target.model.named_modules()}
    result = []
    for layers in (parts.encoder_layers, parts.layers):
        if layers is not None:
            paths = tuple(names[id(layer)] for layer in layers)
            found = (_matrices(target, layer, path) for layer, path in zip(layers, paths, strict=True))
            result.append(Stack(layers, paths, tuple(map(tuple, found))))
    return result


def head_matrix(target: Target) -> Matrix | None:
    """The LM head's; None where it is tied to the embedding table, which stays float, or not of whole blocks."""
    language = target.family.language
    tensor = language.head.names[0]
    if tensor == language.embedding.names[0]:
        return None
    name = next(name for name, module in target.model.named_modules() if module is target.lm_head)
    matrix = Matrix(name, target.lm_head, tensor, _stored_type(target, tensor))
    return matrix if quantizable(matrix.shape) else None


def _matrices(target: Target, layer: nn.Module, path: str) -> Iterator[Matrix]:
    for name, module, transposed in linears(layer, f"{path}."):
        tensor = target.checkpoint.stored(f"{name}.weight")
        matrix = Matrix(name, module, tensor, _stored_type(target, tensor), transposed)
        if quantizable(matrix.shape):
            yield matrix


def _stored_type(target: Target, tensor: str) -> torch.dtype:
    return getattr(torch, target.checkpoint.tensors.dtype(tensor))
