"""Matrices over a vocabulary, whose float64 copies would be most of what parity takes: float64 in slices and by rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ..common.memory import SLICE_BYTES, is_large

WIDE = torch.float64


def keeps_stored(module: nn.Module) -> bool:
    """Whether `module` is a linear layer or a table of embeddings that `compute_in_float64` takes."""
    known = type(module) is nn.Linear or isinstance(module, nn.Embedding)
    weight: Any = module._parameters.get("weight")
    return known and is_large(weight.shape)


def compute_in_float64(module: nn.Module) -> None:
    """Lets `module` compute in float64 while its parameters keep the dtype that they are stored in.

    A linear layer widens a slice of its rows at a time. A table of embeddings widens the rows that are looked up.
    """
    if isinstance(module, nn.Embedding):
        module.padding_idx = None  # a row of the table, which matters in training alone
        module.register_forward_pre_hook(_only_looked_up, with_kwargs=True)
    else:
        module.forward = lambda values: linear_in_slices(values, module.weight, module.bias)  # type: ignore[method-assign,assignment]


def _only_looked_up(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The module's table becomes its rows that are looked up, in float64, and the ids their places in it."""
    (ids,) = (*args, *kwargs.values())
    rows, places = torch.unique(ids, return_inverse=True)
    table: Any = module._parameters["weight"]
    module._parameters["weight"] = nn.Parameter(table[rows].to(WIDE), requires_grad=False)
    return (places,), {}


def linear_in_slices(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear` in float64. `values` [..., in] is float64; `weight` [out, in] and `bias` [out] have any dtype."""
    count = max(1, SLICE_BYTES // (WIDE.itemsize * weight.shape[1]))
    result = values.new_empty(*values.shape[:-1], weight.shape[0])
    for start in range(0, weight.shape[0], count):
        part = slice(start, start + count)
        offset = None if bias is None else bias[part].to(WIDE)
        result[..., part] = functional.linear(values, weight[part].to(WIDE), offset)
    return result
