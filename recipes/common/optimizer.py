"""Muon for matrices, AdamW for everything else: fast on narrow, deep stacks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

OPTIMIZERS = ("muon", "adamw")
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01


def newton_schulz(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Pushes the singular values of a batch of matrices [N, rows, columns] towards 1, computing in `dtype`."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; equal shapes are handled in one batch.

    Args:
        params: two-dimensional parameters.
        lr: step; an update has root-mean-square 0.2 * lr, comparable to AdamW's.
        momentum: Nesterov momentum.
        weight_decay: decoupled decay.
        dtype: in which the orthogonalisation is computed.
        joined: which of the parameters hold several matrices [rows, n * rows] side by side, as GPT-2's query, key and
            value; each is orthogonalised by itself.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = WEIGHT_DECAY,
        dtype: torch.dtype = torch.bfloat16,
        joined: Iterable[Tensor] = (),
    ) -> None:
        self.dtype = dtype
        self._joined = set(map(id, joined))
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault((*p.shape, id(p) in self._joined), []).append(p)
            for members in by_shape.values():
                updates = []
                for p in members:
                    assert p.grad is not None
                    velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    velocity.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(velocity, group["momentum"]))
                directions = self._directions(members, updates)
                for p, direction in zip(members, directions, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])

    def _directions(self, members: list[Tensor], updates: list[Tensor]) -> Iterable[Tensor]:
        """The step of each parameter, all of one shape."""
        rows, columns = members[0].shape
        stack = torch.stack(updates)
        if id(members[0]) in self._joined:  # [N, rows, n * rows] -> [N * n, rows, rows]
            parts = stack.view(len(members), rows, columns // rows, rows).transpose(1, 2)
            steps = newton_schulz(parts.reshape(-1, rows, rows), dtype=self.dtype) * (0.2 * math.sqrt(rows))
            return steps.view(len(members), columns // rows, rows, rows).transpose(1, 2).reshape(stack.shape)
        return newton_schulz(stack, dtype=self.dtype) * (0.2 * math.sqrt(max(rows, columns)))


def build_optimizers(
    named: Iterable[tuple[str, Tensor]],
    lr: float,
    dtype: torch.dtype = torch.bfloat16,
    matrices_by: str = "muon",
) -> list[torch.optim.Optimizer]:
    """Muon or AdamW, as `matrices_by` says (one of `OPTIMIZERS`), over the inner matrices; AdamW over embeddings, heads, norms and
    biases."""
    matrices, rest, joined = [], [], []
    outside = ("shared", "lm_head", "heads", "relative_attention_bias", "embed", "wte", "wpe")
    for name, p in named:
        if not p.requires_grad:
            continue
        (matrices if p.ndim == 2 and not any(o in name for o in outside) else rest).append(p)
        if name.endswith("c_attn.weight"):  # GPT-2's query, key and value
            joined.append(p)
    inner: torch.optim.Optimizer
    if matrices_by == "muon":
        inner = Muon(matrices, lr, dtype=dtype, joined=joined)
    else:
        inner = torch.optim.AdamW(matrices, lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    return [inner, torch.optim.AdamW(rest, lr, betas=BETAS, weight_decay=0.0)]


def schedule(step: int, steps: int, warmup: int, floor: float = 0.02) -> float:
    """Factor of the learning rate: linear warm-up, then cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
