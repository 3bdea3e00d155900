"""Quantises a target in place, layer by layer: each is calibrated on what the quantised layers before it give."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...exporter.quantization.blocks import BLOCK, dequantize
from ...exporter.quantization.choice import HEAD, WeightsChoice
from ...runtime.common.errors import InputError
from ..data.reading.records import Record
from ..targets.target import Target
from .gptq import fed, feeding
from .matrices import Matrix, Stack, head_matrix, stacks
from .recording import Calls, record_calls
from .rounding import round_matrix, scale_type

METHODS = ("gptq", "rounding")

Report = Callable[[str], None]


@dataclass(frozen=True)
class Integers:
    """A matrix as integers int8 [out, in] of `dtype` with scales float32 [out, in / block]."""

    dtype: str
    values: Tensor
    scales: Tensor

    def matrix(self) -> Tensor:
        """Float32 [out, in]."""
        return dequantize(self.values, self.scales)


@dataclass
class Group:
    """Matrices that read the same inputs, which a product of matrices may take together.

    `errors` says for a kind of integers which share of the energy of its outputs the group's error has: the mean over
    calibration inputs x of |(W − Ŵ) x|² over that of |W x|².
    """

    layer: str
    matrices: tuple[Matrix, ...]
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> int:
        """Of all its matrices."""
        return sum(matrix.numbers for matrix in self.matrices)


@dataclass
class Quantized:
    """What became of a target: integers by the matrix's name, and its groups in the order of computation; `tokens` were read, and
    the arithmetic of rounding took `cpu_seconds` for `numbers`."""

    integers: dict[str, Integers] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    tokens: int = 0
    numbers: int = 0
    cpu_seconds: float = 0.0

    @property
    def matrices(self) -> Iterator[Matrix]:
        """Of all groups."""
        return (matrix for group in self.groups for matrix in group.matrices)


@torch.no_grad()
def quantize_layers(
    target: Target,
    choice: WeightsChoice,
    records: Sequence[Record],
    method: str = "gptq",
    block: int = BLOCK,
    report: Report = lambda line: None,
) -> Quantized:
    """Gives the linear modules of the target's layers, and its LM head where that is not tied, the values of integers; those
    that `choice` leaves float stay as they are.

    `method` is one of `METHODS`. Raises InputError where the target makes something of the records that is not finite.
    """
    run = _Run(choice, method, block)
    for stack in stacks(target):
        calls = record_calls(target, stack.layers, records)
        for index, layer in enumerate(stack.layers):
            if stack.matrices[index]:
                run.quantize_layer(stack, index, calls)
            calls.advance(layer, index)
            report(f"quantized layer {index + 1}/{len(stack.layers)}")
    run.result.tokens = calls.tokens
    head = head_matrix(target)
    if head is not None:
        hessian = _Hessian(head.module, head.name)
        for hidden in calls.hidden:
            hessian.add(target.features(hidden))
        run.quantize_group(Group(HEAD, (head,)), hessian)
    return run.result


class _Run:
    def __init__(self, choice: WeightsChoice, method: str, block: int) -> None:
        self.choice, self.method, self.block = choice, method, block
        self.result = Quantized()

    def quantize_layer(self, stack: Stack, index: int, calls: Calls) -> None:
        """All groups of a layer, on the inputs that they have while the layer itself is float."""
        layer = stack.layers[index]
        together = _shared_inputs(
            stack.matrices[index], lambda: calls.arguments[index][0].run(layer, calls.hidden[0])
        )
        hessians = [_Hessian(group[0].module, group[0].name) for group in together]
        with ExitStack() as hooks:
            for hessian in hessians:
                hooks.callback(hessian.watch())
            for _ in calls.outputs(layer, index):
                pass
        for group, hessian in zip(together, hessians, strict=True):
            self.quantize_group(Group(stack.paths[index], group), hessian)

    def quantize_group(self, group: Group, hessian: _Hessian) -> None:
        """Matrices of one kind are rounded together: they have the same Hessian."""
        self.result.groups.append(group)
        kinds: dict[str, list[Matrix]] = {}
        for matrix in group.matrices:
            kind = self.choice.dtype_of(matrix.name)
            if kind is not None:
                kinds.setdefault(kind, []).append(matrix)
        if not kinds:
            return
        total = hessian.checked()
        factor = feeding(total) if self.method == "gptq" else None
        energy, errors = 0.0, 0.0
        for kind, matrices in kinds.items():
            stacked = torch.cat([matrix.read().float() for matrix in matrices])
            begin = time.process_time()
            scales = scale_type(matrices[0].dtype)
            if factor is None:
                values, kept = round_matrix(stacked, kind, self.block, scales)
            else:
                values, kept = fed(stacked, factor, kind, self.block, scales)
            self.result.cpu_seconds += time.process_time() - begin
            self.result.numbers += values.numel()
            error = stacked - dequantize(values, kept)
            energy += _energy(stacked, total)
            errors += _energy(error, total)
            rows = [matrix.shape[0] for matrix in matrices]
            for matrix, own, scale in zip(matrices, values.split(rows), kept.split(rows), strict=True):
                self.result.integers[matrix.name] = integers = Integers(kind, own, scale)
                matrix.write(integers.matrix())
        group.errors["+".join(kinds)] = errors / energy if energy > 0 else 0.0


class _Hessian:
    """The sum of x xᵀ over the inputs x of a module."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._total: Tensor | None = None

    def add(self, inputs: Tensor) -> None:
        """Inputs [..., in]."""
        rows = inputs.flatten(0, -2).float()
        if self._total is None:
            self._total = rows.new_zeros(rows.shape[1], rows.shape[1])
        self._total.addmm_(rows.T, rows)

    def watch(self) -> Callable[[], None]:
        """Adds what the module is given, until the result is called."""
        hook = self._module.register_forward_pre_hook(lambda _module, given: self.add(given[0]))
        return hook.remove

    def checked(self) -> Tensor:
        """Float32 [in, in]; InputError where it is not finite or nothing was seen."""
        if self._total is None or not self._total.isfinite().all():
            raise InputError(
                f"{self._name} reads numbers that are not finite, or nothing, in these records; calibrate on other --data"
            )
        return self._total


def _shared_inputs(matrices: Sequence[Matrix], run: Callable[[], Any]) -> list[tuple[Matrix, ...]]:
    """The matrices by the tensor that each reads, in the order in which they compute."""
    seen: list[
        tuple[Tensor, Matrix]
    ] = []  # what was read lives, so that no other tensor takes its place in memory
    with ExitStack() as hooks:
        for matrix in matrices:

            def keep(_module: nn.Module, given: tuple[Any, ...], matrix: Matrix = matrix) -> None:
                seen.append((given[0], matrix))

            hooks.callback(matrix.module.register_forward_pre_hook(keep).remove)
        run()
    groups: dict[tuple[int, int], list[Matrix]] = {}
    for read, matrix in seen:
        groups.setdefault((read.data_ptr(), read.numel()), []).append(matrix)
    return [tuple(group) for group in groups.values()]


def _energy(matrix: Tensor, hessian: Tensor) -> float:
    """The sum of |M x|² over inputs x with that sum of x xᵀ."""
    return float(torch.sum(matrix @ hessian * matrix, dtype=torch.float64))
