"""The loop of a language model's training: steps, log, checks and saves, to be continued where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .long_run import LongRun
from .optimizer import build_optimizers, schedule

WARMUP = 100
LOG_EVERY = 25

Part = dict[str, tuple[float, Tensor]]
"""Weight and value of each loss that one forward pass gives, by name."""


@dataclass(frozen=True)
class Schedule:
    """How long a training runs.

    Args:
        steps: of the whole schedule. lr: peak learning rate.
        stop_at: end, with the state saved, after so many steps of the schedule.
        check_every: steps between two checks.
        optimizer: of the inner matrices, see `build_optimizers`.
    """

    steps: int
    lr: float
    stop_at: int | None = None
    check_every: int = 250
    optimizer: str = "muon"


def learning(model: nn.Module, frozen: tuple[str, ...]) -> list[tuple[str, Tensor]]:
    """The parameters that learn, by name: all but those whose names begin with `frozen`. No other wants a gradient."""
    model.requires_grad_(False)
    return [(n, p.requires_grad_()) for n, p in model.named_parameters() if not n.startswith(frozen)]


def run_steps(
    run: LongRun,
    plan: Schedule,
    model: nn.Module,
    trained: Sequence[tuple[str, Tensor]],
    losses: Callable[[int], Iterable[Part]],
    check: Callable[[], dict[str, Any]],
    dtype: torch.dtype,
) -> int:
    """Runs or continues the steps; returns the one that was reached.

    Args:
        model: receives the state. trained: its parameters that learn, by name.
        losses: of a step, part by part. Each part is propagated back before the next is computed, so that memory holds
            the activations of one alone. The values' means are logged.
        check: figures of the model as it stands, for the log.
        dtype: in which Muon orthogonalises.
    """
    optimizers = build_optimizers(trained, plan.lr, dtype, plan.optimizer)
    first = _resume(run, model, optimizers)
    clock, busy = time.time(), time.process_time()
    sums: dict[str, Tensor] = {}  # on the device: a step waits for no value
    done, last = 0, min(plan.steps, plan.stop_at or plan.steps)
    for step in range(first, last):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = plan.lr * schedule(step, plan.steps, WARMUP)
        for part in losses(step):
            sum((weight * value for weight, value in part.values()), torch.zeros(())).backward()
            for name, (_, value) in part.items():
                sums[name] = sums.get(name, 0.0) + value.detach().double()
        nn.utils.clip_grad_norm_([p for _, p in trained], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done, at = done + 1, step + 1
        ending = at == last or run.stopping
        if at % LOG_EVERY == 0 or ending:
            line: dict[str, Any] = {"step": at} | {n: round(v.item() / done, 4) for n, v in sums.items()}
            line |= {
                "seconds": round(time.time() - clock, 1),
                "cpu_seconds": round(time.process_time() - busy, 1),
                "seconds_per_step": round((time.time() - clock) / done, 3),
            }
            if at % plan.check_every == 0 or at == last:
                line |= check()
            run.log(line)
            clock, busy, done, sums = time.time(), time.process_time(), 0, {}
        if run.due() or ending:
            run.save(
                {
                    "step": at,
                    "model": {n: p.detach() for n, p in trained},
                    "optimizers": [o.state_dict() for o in optimizers],
                }
            )
        if run.stopping:
            return at
    return max(first, last)


def _resume(run: LongRun, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Loads the state if there is one; no draw has a state of its own, all are keyed by the step."""
    state = run.load()
    if state is None:
        return 0
    model.load_state_dict(state["model"], strict=False)
    for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(stored)
    return state["step"]
