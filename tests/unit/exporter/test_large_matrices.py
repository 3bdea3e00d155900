"""Matrices over the vocabulary are not held in float64, and what float64 computes of them is the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.common import memory
from vlmexport.exporter.families.registry import family_for
from vlmexport.exporter.parity import large_matrices
from vlmexport.exporter.parity.capture import capture
from vlmexport.exporter.parity.errors import float32_errors
from vlmexport.exporter.parity.recorded import compared_inputs
from vlmexport.exporter.parity.reference import load_exact, load_reference


@pytest.mark.parametrize("name", ["llama", "t5", "vit-gpt2", "gemma3"])
def test_errors_are_the_same_with_large_matrices(
    tiny_checkpoint: Callable, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint(name, dtype=torch.float16))
    family = family_for(checkpoint)
    cuts = (0, family.decoder.num_layers)
    *_, (kind, inputs) = compared_inputs(family, 12, streamed=True)
    given = capture(load_reference(checkpoint, streamed=True), family, kind, cuts, inputs)
    held = float32_errors(load_exact(checkpoint), family, cuts, inputs, given)

    shape = family.language.head.shape
    monkeypatch.setattr(memory, "LARGE_MATRIX_BYTES", 8 * shape[0] * shape[1])
    monkeypatch.setattr(large_matrices, "SLICE_BYTES", 1000 * shape[1])
    model = load_exact(checkpoint)
    widths = seen_dtypes(model)
    sliced = float32_errors(model, family, cuts, inputs, given)
    assert widths["head"] == {torch.float16} and widths["table"] == {torch.float64}
    assert 0 < np.abs(held.logits).max() < 1e-2
    np.testing.assert_allclose(sliced.logits, held.logits, rtol=0, atol=1e-9)
    for mine, theirs in zip(sliced.caches, held.caches, strict=True):
        for part, rows in theirs.items():
            np.testing.assert_allclose(mine[part], rows, rtol=0, atol=1e-9)
    assert all(p.is_meta or not p.numel() for p in model.parameters())
    assert all(p.dtype == torch.float64 for p in model.parameters())


def seen_dtypes(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """What the head's and the table's weights are while they run; of the table, few rows are there."""
    seen: dict[str, set[torch.dtype]] = {"head": set(), "table": set()}

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        kind = "table" if isinstance(module, nn.Embedding) else "head"
        seen[kind].add(module.weight.dtype)
        if kind == "table":
            assert len(module.weight) == len(args[0].unique())

    for module in model.modules():
        if large_matrices.keeps_stored(module):
            module.register_forward_pre_hook(note)
    return seen


def test_a_linear_layer_in_slices_is_the_layer_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(16, 50, bias=True)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).half()
    values = torch.randn(2, 3, 16, generator=generator, dtype=torch.float64)
    for rows in (1, 7, 50, 99):
        monkeypatch.setattr(large_matrices, "SLICE_BYTES", rows * 16 * 8)
        found = large_matrices.linear_in_slices(values, layer.weight, layer.bias)
        expected = nn.functional.linear(values, layer.weight.double(), layer.bias.double())
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_only_matrices_of_a_gigabyte_are_large() -> None:
    assert not memory.is_large((1 << 15, (1 << 12) - 1)) and memory.is_large((1 << 15, 1 << 12))
    assert not memory.is_large((1 << 30,)) and not memory.is_large((8, 1 << 15, 1 << 12))
    count = 1 << 27
    assert memory.widened_bytes((1 << 15, 1 << 12), 2 * count) == 6 * count
    assert memory.widened_bytes((1 << 27,), 2 * count) == 10 * count
