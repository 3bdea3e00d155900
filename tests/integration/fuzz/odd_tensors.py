"""Tensors that are no weights, and pickles that are no tensors."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUMBERS = (float("nan"), float("inf"), float("-inf"), 1e38, -1e38, 0.0, 1e-45)
SAVED = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
"""Types that both formats hold."""


def odd_values(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same with odd numbers, in another type, or of another shape: what both formats hold."""
    kind = rng.randrange(4)
    if kind == 0:
        return tensor.to(rng.choice(SAVED))
    if kind == 1:
        changed = tensor.clone() if tensor.is_floating_point() else tensor.float()
        flat = changed.reshape(-1)
        flat[rng.randrange(flat.numel()) if flat.numel() else 0 :] = rng.choice(NUMBERS)
        return changed
    if kind == 2:
        shapes = (
            (),
            (0,),
            (1,),
            (1, *tensor.shape),
            tuple(tensor.shape)[:-1],
            tuple(tensor.shape)[::-1],
            (tensor.numel(),),
        )
        return torch.full(rng.choice(shapes), 0.5, dtype=tensor.dtype)
    changed = tensor.clone()
    if not changed.is_floating_point():  # a table of ids
        changed[rng.randrange(len(changed))] = rng.choice((-1, 2**62, -(2**63), 5, 10**6))
    return changed


def odd_kind(tensor: Tensor, rng: random.Random) -> Any:
    """What only a pickle holds: tensors of another kind, and what is no tensor."""
    flat = tensor.float()
    makers = (
        lambda: flat.to(torch.complex64), lambda: flat.to_sparse(), lambda: flat.to("meta"),
        lambda: torch.quantize_per_tensor(flat, 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([flat.reshape(-1), flat.reshape(-1)[:3]]),
        lambda: torch.nn.Parameter(flat), lambda: flat.requires_grad_(), lambda: flat.t() if flat.dim() == 2 else flat,
        lambda: torch.zeros(1).expand(10**5, 10**5), lambda: [flat], lambda: {"x": flat}, lambda: None, lambda: 3, lambda: "x",
    )  # fmt: skip
    return rng.choice(makers)()


class Harm:
    """A pickle that makes a file when it is read as pickles are."""

    def __init__(self, mark: Path, rng: random.Random) -> None:
        self._call = rng.choice(
            (
                (os.system, (f"touch {mark}",)),
                (eval, (f"open({str(mark)!r}, 'w')",)),
                (exec, (f"open({str(mark)!r}, 'w')",)),
                (os.mkdir, (str(mark),)),
                (Path.touch, (mark,)),
            )
        )

    def __reduce__(self) -> Any:
        return self._call


def odd_table(tensors: Mapping[str, Tensor], rng: random.Random, mark: Path) -> Any:
    """What a pickle holds in place of a table of tensors."""
    return rng.choice(
        (
            lambda: {**tensors, "x": Harm(mark, rng)},
            lambda: Harm(mark, rng),
            lambda: list(tensors.values()),
            lambda: {"state_dict": dict(tensors)},
            lambda: dict(enumerate(tensors.values())),
            lambda: {},
            lambda: {(name,): value for name, value in tensors.items()},
        )
    )()
