"""The training loop: deterministic, resumable, the same code on one CPU and on several GPUs (accelerate).

It knows no draft kind: an `Objective` brings the network, the loss and the draft.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ...exporter.drafts.common.base import Draft
from ...exporter.drafts.folders import open_draft
from ...exporter.output import whole_folder
from ...exporter.output.leftovers import remove_leftovers
from ...runtime.common.errors import DivergedError
from ...runtime.common.locks import only_one
from ..common.processes import all_summed, check_shared, join_processes, wait_for_all
from ..common.provenance import provenance
from ..features.features import Source, in_batches
from ..objectives.base import LearnedTarget, Objective
from ..objectives.training_options import LoopOptions
from .schedule import batch_indices, learning_rate
from .state import forget_state, load_state, save_state
from .training_log import TrainingLog, cut_log

LOCK = "lock"
"""A file of a run's folder, held by the process that writes there."""


class Trainer:
    """One run in one folder: `train` starts it, or continues it where it was killed.

    The folder receives `last/` and `best/` (draft folders), `state.pt`, `log.jsonl`, and `tensorboard/`
    where that package is installed.

    Args:
        build: gives the untrained draft for the target; called once, after the seed is set.
        options: of the loop. target: frozen, unless the objective changes it.
        source, validation: rows to train on and to choose the best draft by.
        data: identity of the data; a resumed run must have the same. out: the folder.
        device: of the target and of what it gives.
    """

    def __init__(
        self,
        build: Callable[[LearnedTarget], Objective],
        options: LoopOptions,
        target: LearnedTarget,
        source: Source[Any],
        validation: Source[Any],
        data: str,
        out: Path,
        eval_every: int = 250,
        save_every: int = 100,
        log_every: int = 20,
        device: torch.device | str = "cpu",
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.target, self.out = target, out
        self.source, self.validation = source, validation
        self.eval_every, self.save_every, self.log_every = eval_every, save_every, log_every
        cpu = torch.device(device).type == "cpu"
        join_processes(cpu)
        self.accelerator = Accelerator(cpu=cpu)
        torch.manual_seed(options.seed)
        self.objective = build(target).to(self.accelerator.device)
        self._log = TrainingLog(out, self.objective.shown, self.accelerator.is_main_process, report)
        self.options = options.with_rate(self.objective.learning_rate(target.hidden_size))
        self.objective.options = self.objective.options.completed(self.options)
        self.all_options = {**self.objective.options.to_dict(), **self.options.to_dict()}
        kind = self.objective.kind
        self.run = {"draft": kind, **self.all_options, "target": target.fingerprint, "data": data}
        self.step, self.best = 0, -math.inf

    def train(self, restart: bool = False, stop_after: int | None = None) -> Draft:
        """Runs to the last step, or `stop_after` steps from here (as a kill would); returns the best draft.

        Raises:
            OptionError: another run writes to the folder, it holds one with other options, or the processes do not
                share it.
            DivergedError: the loss is no number any more. LostProcessError: another process of this run ended.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        alone = only_one(
            self.out / LOCK, remedy="; several processes of one training are started by torchrun"
        )
        with alone if self.accelerator.is_main_process else nullcontext():
            return self._train(restart, stop_after)

    def _train(self, restart: bool, stop_after: int | None) -> Draft:
        check_shared(self.out, LOCK)
        options = self.options
        optimizer: Any = torch.optim.AdamW(
            self.objective.groups(), lr=options.lr or 0.0, weight_decay=options.weight_decay
        )
        defaults = {**self.objective.options.defaults(), **options.defaults()}
        state = None if restart else load_state(self.out, self.run, defaults)
        if state is not None:
            self.objective.load_state_dict(state["objective"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.step, self.best = state["step"], state["best"]
            self._log.say(f"resumed at step {self.step}/{options.steps}")
        if self.accelerator.is_main_process:
            self._begin(restart)
        optimizer = self.accelerator.prepare(optimizer)
        if self.objective.notice:
            self._log.say(self.objective.notice)
        self._log.open_board(self.step)
        start, clock, since, seen = self.step, time.perf_counter(), time.perf_counter(), 0
        while self.step < options.steps and (stop_after is None or self.step - start < stop_after):
            parts, count = self._one_step(optimizer)
            seen += count
            self.step += 1
            last = self.step == options.steps
            if (self.step % self.log_every == 0 or last) and parts:
                now = time.perf_counter()
                left = (now - clock) / (self.step - start) * (options.steps - self.step)
                rate = seen / (now - since)
                self._log.write("train", self.step, parts, tokens_per_second=round(rate))
                self._log.say(self._log.step_line(self.step, options.steps, parts, rate, left))
                since, seen = now, 0
            if self.step % self.eval_every == 0 or last:
                self._validate()
            if self.step % self.save_every == 0 or last:
                self._save(optimizer)
        self._log.close()
        wait_for_all()
        if self.step < options.steps:
            return self._draft({})
        self.objective.restore(self.out / "best")
        best = open_draft(self.out / "best")
        draft = self.objective.finished(best, self.validation, self.target)
        if draft is not best and self.accelerator.is_main_process:
            self._write(draft, "best")
        wait_for_all()
        return draft

    def _begin(self, restart: bool) -> None:
        """Leaves in the folder what belongs to the step that the run begins with: a run that was killed was further, and logs
        the same again."""
        if restart:
            forget_state(self.out)
        for name in ("best", "last"):
            remove_leftovers(self.out / name)
        cut_log(self.out, self.step)

    def _write(self, draft: Draft, name: str) -> None:
        """Replaces the folder of a draft as a whole: its files belong together."""
        with whole_folder(self.out / name) as folder:
            self.objective.save(draft, folder)

    def _one_step(self, optimizer: Any) -> tuple[dict[str, float], int]:
        """(parts of the loss over this process's rows, rows of all processes); nothing is learned from records without
        a row.

        The gradient is that of the mean over the whole batch, however many processes share it and whoever has how
        many rows: a process may have none.
        """
        options = self.options
        rates: dict[str, float] = {}
        for group in optimizer.param_groups:
            place = group.get("peak"), group.get("start", 0), group.get("end")
            group["lr"] = learning_rate(self.step, options, *place)
            rates[group.get("rate", "lr")] = group["lr"]
        self.objective.begin(self.step)
        self._draw_apart()
        indices = batch_indices(self.step, len(self.source), options)
        mine = indices[self.accelerator.process_index :: self.accelerator.num_processes]
        batch = self.source.rows(mine) if mine else []
        count = self._summed(len(batch))
        if not count:
            return {}, 0
        self.objective.train()
        parts: dict[str, torch.Tensor] = {}
        if len(batch):
            loss, parts = self.objective.loss(batch, self.target)  # type: ignore[arg-type]
            self._check_loss(loss.item())
            self.accelerator.backward(loss * (len(batch) / count))
        if self.accelerator.num_processes > 1:
            self._sum_gradients()
        for own in self.objective.clipped():
            if options.clip_value is not None:
                self.accelerator.clip_grad_value_(own, options.clip_value)
            self.accelerator.clip_grad_norm_(own, options.clip)
        optimizer.step()
        optimizer.zero_grad()
        values = {k: v.item() for k, v in parts.items()}
        return (values | rates if values else {}), count

    def _draw_apart(self) -> None:
        """Lets each of several processes draw numbers of its own (noise on what is learned from), those of this step
        whatever was drawn before: a run that is continued draws the same. One process goes on from its stored state."""
        if self.accelerator.num_processes > 1:
            place = [self.options.seed, self.step, self.accelerator.process_index]
            torch.manual_seed(int(np.random.SeedSequence(place).generate_state(1)[0]))

    def _check_loss(self, loss: float) -> None:
        """DivergedError where a number was lost: nothing that follows would bring it back."""
        if not math.isfinite(loss):
            raise DivergedError(
                f"the loss is {'NaN' if math.isnan(loss) else 'infinite'} at step {self.step}: lower --lr (it was "
                f"{self.options.lr:g}) and begin anew with --restart"
            )

    def _summed(self, count: int) -> int:
        """Over all processes."""
        if self.accelerator.num_processes == 1:
            return count
        return int(all_summed(torch.tensor(count, device=self.accelerator.device)).item())

    def _sum_gradients(self) -> None:
        """Let every process have the sum of all gradients, also one whose own batch was empty."""
        learned = [p for p in self.objective.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in learned])
        for p, grad in zip(learned, all_summed(flat).split([p.numel() for p in learned]), strict=True):
            p.grad = grad.view_as(p).clone()

    @torch.no_grad()
    def _validate(self) -> None:
        """Means over rows; keeps the draft with the highest score as `best/`."""
        self.objective.eval()
        sums: dict[str, float] = {}
        total = 0
        for batch in in_batches(self.validation, self.options.batch_size):
            _, parts = self.objective.loss(batch, self.target)
            total += len(batch)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value.item() * len(batch)
        means = {name: value / max(1, total) for name, value in sums.items()}
        if total:
            self._check_loss(means["loss"])
        self._log.write("validation", self.step, means)
        better = self.objective.score(means)
        self._log.say(self._log.validation_line(self.step, means) + (" (best)" if better > self.best else ""))
        if better > self.best:
            self.best = better
            if self.accelerator.is_main_process:
                draft = self._draft({"step": self.step, "validation": means})
                self._write(draft, "best")

    def _save(self, optimizer: Any) -> None:
        """`last/` first: a run that is continued from an older state writes it again."""
        if not self.accelerator.is_main_process:
            return
        self._write(self._draft({"step": self.step}), "last")
        save_state(
            self.out,
            {
                "run": self.run,
                "objective": self.objective.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "step": self.step,
                "best": self.best,
            },
        )

    def _draft(self, evaluation: dict[str, Any]) -> Draft:
        made = {"options": self.all_options, "processes": self.accelerator.num_processes}
        return self.objective.draft(provenance() | made, evaluation)
