"""The training loop: deterministic, resumable, the same code on one CPU and on several GPUs (accelerate)."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from ...exporter.drafts.imitation import ImitationDraft, ImitationNetwork
from .config import TrainConfig
from .features import FeatureSource
from .objectives.imitation import Head, Objective
from .provenance import provenance
from .state import load_state, save_state


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up over `warmup` steps, then half a cosine to 0 at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / (config.warmup + 1)
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def batch_indices(step: int, size: int, config: TrainConfig) -> list[int]:
    """Records of one step: consecutive pieces of a shuffle per epoch, a function of (seed, step) alone."""
    count = min(config.batch_size, size)
    per_epoch = size // count
    epoch, piece = divmod(step, per_epoch)
    order = np.random.default_rng([config.seed, epoch]).permutation(size)
    return order[piece * count : (piece + 1) * count].tolist()


class Trainer:
    """One run in one folder: `train` starts it, or continues it where it was killed.

    The folder receives `last/` and `best/` (draft folders), `state.pt`, `log.jsonl`, and `tensorboard/`
    where that package is installed.

    Args:
        config: the options. head: the frozen target's final norm and LM head.
        target: `name`, `fingerprint`, `num_layers` of the target.
        source, validation: rows to train on and to choose the best network by.
        data: identity of the data; a resumed run must have the same. out: the folder.
        device: of the target and of the rows.
    """

    def __init__(
        self,
        config: TrainConfig,
        head: Head,
        hidden_size: int,
        target: dict[str, Any],
        source: FeatureSource,
        validation: FeatureSource,
        data: str,
        out: Path,
        eval_every: int = 250,
        save_every: int = 100,
        log_every: int = 20,
        device: torch.device | str = "cpu",
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.config, self.target, self.out = config, target, out
        self.source, self.validation = source, validation
        self.eval_every, self.save_every, self.log_every = eval_every, save_every, log_every
        self.report = report or (lambda line: print(line, file=sys.stderr, flush=True))
        self.run = {**config.to_dict(), "target": target["fingerprint"], "data": data}
        self.accelerator = Accelerator(cpu=torch.device(device).type == "cpu")
        torch.manual_seed(config.seed)
        self.network = ImitationNetwork(
            hidden_size, config.num_linear, config.activation, config.norm, config.residual
        )
        self.objective = Objective(config, hidden_size, target["num_layers"], head).to(
            self.accelerator.device
        )
        self.step, self.best = 0, -1.0

    def train(self, restart: bool = False, stop_after: int | None = None) -> ImitationDraft:
        """Runs to the last step, or `stop_after` steps from here (as a kill would); returns the best draft."""
        self.out.mkdir(parents=True, exist_ok=True)
        decayed = [p for p in self.network.parameters() if p.ndim > 1]
        plain = [p for p in self.network.parameters() if p.ndim <= 1]
        plain += [p for p in self.objective.parameters() if p.requires_grad]
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        optimizer: Any = torch.optim.AdamW(groups, lr=self.config.lr, weight_decay=self.config.weight_decay)
        state = None if restart else load_state(self.out, self.run)
        if state is not None:
            self.network.load_state_dict(state["network"])
            self.objective.load_state_dict(state["objective"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.step, self.best = state["step"], state["best"]
            self._say(f"resumed at step {self.step}/{self.config.steps}")
        network, optimizer = self.accelerator.prepare(self.network, optimizer)
        board = self._board()
        start, clock, since, seen = self.step, time.perf_counter(), time.perf_counter(), 0
        while self.step < self.config.steps and (stop_after is None or self.step - start < stop_after):
            parts, count = self._one_step(network, optimizer)
            seen += count
            self.step += 1
            last = self.step == self.config.steps
            if self.step % self.log_every == 0 or last:
                now = time.perf_counter()
                left = (now - clock) / (self.step - start) * (self.config.steps - self.step)
                self._log("train", parts, board, tokens_per_second=round(seen / (now - since)))
                self._say(_line(self.step, self.config.steps, parts, seen / (now - since), left))
                since, seen = now, 0
            if self.step % self.eval_every == 0 or last:
                self._validate(network, board)
            if self.step % self.save_every == 0 or last:
                self._save(network, optimizer)
        if board is not None:
            board.close()
        self.accelerator.wait_for_everyone()
        complete = self.step == self.config.steps
        return ImitationDraft.load(self.out / "best") if complete else self._draft(self.network, {})

    def _one_step(self, network: nn.Module, optimizer: Any) -> tuple[dict[str, float], int]:
        rate = learning_rate(self.step, self.config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        indices = batch_indices(self.step, len(self.source), self.config)
        mine = indices[self.accelerator.process_index :: self.accelerator.num_processes] or indices[:1]
        rows = self.source.rows(mine)
        network.train()
        loss, parts = self.objective(network(rows.trunk), rows)
        self.accelerator.backward(loss)
        if self.accelerator.num_processes > 1 and self.objective.projection is not None:
            gradient = self.objective.projection.grad  # not wrapped by DDP
            if gradient is not None:
                gradient.copy_(self.accelerator.reduce(gradient, "mean"))  # type: ignore[arg-type]
        self.accelerator.clip_grad_norm_(network.parameters(), self.config.clip)
        optimizer.step()
        optimizer.zero_grad()
        return {k: v.item() for k, v in parts.items()} | {"lr": rate}, len(
            rows
        ) * self.accelerator.num_processes

    @torch.no_grad()
    def _validate(self, network: nn.Module, board: Any) -> None:
        """Means over rows; keeps the network with the highest agreement, then overlap, as `best/`."""
        network.eval()
        sums: dict[str, float] = {}
        total = 0
        size, mine = self.config.batch_size, range(len(self.validation))
        for at in range(0, len(mine), size):
            rows = self.validation.rows(list(mine[at : at + size]))
            _, parts = self.objective(network(rows.trunk), rows)
            total += len(rows)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(rows)
        means = {name: value / max(1, total) for name, value in sums.items()}
        self._log("validation", means, board)
        better = means["agreement"] + 1e-3 * means["overlap"]
        self._say(
            f"step {self.step}: validation loss {means['loss']:.4f}, agreement {means['agreement']:.4f}, "
            f"Σmin(p,q) {means['overlap']:.4f}" + (" (best)" if better > self.best else "")
        )
        if better > self.best:
            self.best = better
            if self.accelerator.is_main_process:
                plain = self.accelerator.unwrap_model(network)
                self._draft(plain, {"step": self.step, "validation": means}).save(self.out / "best")

    def _save(self, network: nn.Module, optimizer: Any) -> None:
        if not self.accelerator.is_main_process:
            return
        plain = self.accelerator.unwrap_model(network)
        save_state(
            self.out,
            {
                "run": self.run,
                "network": plain.state_dict(),
                "objective": self.objective.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
                "best": self.best,
            },
        )
        self._draft(plain, {"step": self.step}).save(self.out / "last")

    def _draft(self, network: Any, evaluation: dict[str, Any]) -> ImitationDraft:
        made = provenance() | {"options": self.config.to_dict()}
        return ImitationDraft(network, self.config.layer, self.target, made, evaluation)

    def _board(self) -> Any:
        if not self.accelerator.is_main_process:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(self.out / "tensorboard"), purge_step=self.step)

    def _log(self, kind: str, values: dict[str, float], board: Any, **extra: float) -> None:
        if not self.accelerator.is_main_process:
            return
        rounded = {k: round(v, 6) for k, v in values.items()}
        with (self.out / "log.jsonl").open("a") as out:
            out.write(json.dumps({"step": self.step, "kind": kind, **rounded, **extra}) + "\n")
        if board is not None:
            for name, value in {**values, **extra}.items():
                board.add_scalar(f"{kind}/{name}", value, self.step)

    def _say(self, line: str) -> None:
        if self.accelerator.is_main_process:
            self.report(line)


def _line(step: int, steps: int, parts: dict[str, float], rate: float, left: float) -> str:
    minutes, seconds = divmod(round(left), 60)
    return (
        f"step {step}/{steps}  loss {parts['loss']:.4f}  Σmin(p,q) {parts['overlap']:.4f}  "
        f"agreement {parts['agreement']:.4f}  {rate:,.0f} tokens/s  {minutes}:{seconds:02d} left"
    )
