"""What a training tells: lines for the user, `log.jsonl`, and TensorBoard's files where that package is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...runtime.common.atomic_files import atomic_write

LOG = "log.jsonl"
"""A file of a run's folder: a line of JSON for each step that is told, and for each validation."""


def lines_until(log: bytes, step: int) -> bytes:
    """The lines of a log up to those of `step`; without one that a kill cut off, and without all behind it."""
    kept = []
    for line in log.splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line)
    return b"".join(kept)


def cut_log(folder: Path, step: int) -> None:
    """Leaves in the log of a run's folder what was logged up to `step`."""
    log = folder / LOG
    if log.exists():
        kept = lines_until(log.read_bytes(), step)
        with atomic_write(log) as out:
            out.write(kept)


class TrainingLog:
    """The log of one run. Of several processes the main one alone writes.

    Args:
        folder: of the run. shown: label → part of the loss that lines for the user name.
        writes: whether this process writes. report: receives the lines; by default they go to the standard error.
    """

    def __init__(
        self,
        folder: Path,
        shown: Mapping[str, str],
        writes: bool,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._shown, self._writes = folder, shown, writes
        self._report = report or (lambda line: print(line, file=sys.stderr, flush=True))
        self._board: Any = None

    def open_board(self, step: int) -> None:
        """Opens TensorBoard's files, where the package is installed, without what they hold from `step` on."""
        if not self._writes:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=step)

    def close(self) -> None:
        """Closes TensorBoard's files."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def say(self, line: str) -> None:
        """A line for the user."""
        if self._writes:
            self._report(line)

    def write(self, kind: str, step: int, values: Mapping[str, float], **extra: float) -> None:
        """A line of `log.jsonl`, and the values for TensorBoard."""
        if not self._writes:
            return
        rounded = {k: round(v, 6) for k, v in values.items()}
        with (self._folder / LOG).open("a") as out:
            out.write(json.dumps({"step": step, "kind": kind, **rounded, **extra}) + "\n")
        if self._board is not None:
            for name, value in {**values, **extra}.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def step_line(self, step: int, steps: int, parts: Mapping[str, float], rate: float, left: float) -> str:
        """How far a training of `steps` steps is: parts of the loss, tokens a second, seconds left."""
        minutes, seconds = divmod(round(left), 60)
        shown = "".join(f"  {label} {parts[part]:.4f}" for label, part in self._shown.items())
        return (
            f"step {step}/{steps}  loss {parts['loss']:.4f}{shown}  {rate:,.0f} tokens/s  "
            f"{minutes}:{seconds:02d} left"
        )

    def validation_line(self, step: int, means: Mapping[str, float]) -> str:
        """What a validation gave."""
        shown = "".join(f", {label} {means[part]:.4f}" for label, part in self._shown.items())
        return f"step {step}: validation loss {means['loss']:.4f}{shown}"
