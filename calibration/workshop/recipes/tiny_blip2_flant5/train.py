"""The training of the language model: the vision side frozen, texts drawn anew for every step, no deep supervision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...precision import computing, dtype_of
from ...scenes.scene import TRAIN, VALIDATION
from ..common.batches import Batches
from ..common.captioner import LONGEST, cross_entropy
from ..common.checks import Checks
from ..common.long_run import LongRun
from ..common.loop import Schedule, run_steps
from ..common.rows import image_rows
from .captioner import Blip2T5
from .model import FROZEN, save_bundle
from .prompts import PROMPTS
from .start import begin
from .tokenizer import build_tokenizer

ANSWERS = 0.3  # weight of the answers' loss


def train(
    out: Path,
    steps: int,
    start: Path | None,
    pictures: int = 64_000,
    captions: int = 64,
    questions: int = 64,
    lr: float = 3e-3,
    seed: int = 0,
    precision: str = "auto",
    stop_at: int | None = None,
    check_every: int = 250,
    checked: int = 128,
    save_every: float = 300.0,
) -> int:
    """Runs or continues the training; returns the step that was reached, 0 where it was stopped before the first.

    `out` receives ``data`` (image rows), ``state.pt``, ``log.jsonl`` and, at every check, ``model``.

    Args:
        steps, lr, stop_at, check_every: see `Schedule`.
        start: see `start.begin`; None takes ``out/vision/state.pt``, which the vision stage writes.
        pictures: training scenes; each is used plain and mirrored.
        captions, questions: of a step. seed: of weights, scenes and draws.
        precision: see `workshop.precision`.
        checked: validation scenes of a check.
        save_every: seconds between two saves of the state.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype = dtype_of(precision)
    tokenizer = build_tokenizer()
    model, begun = begin(tokenizer, seed, start, out / "vision" / "state.pt")
    captioner = Blip2T5(model, tokenizer)
    settings = {
        "steps": steps,
        "start": begun,
        "pictures": pictures,
        "captions": captions,
        "questions": questions,
        "lr": lr,
        "seed": seed,
        "vocabulary": len(tokenizer),
    }
    indices = TRAIN[:pictures]
    with LongRun(out, settings, save_every) as run:
        path = out / "data" / f"rows-{begun}-{seed}-{pictures}.f16"
        rows = image_rows(path, captioner, seed, indices, lambda: run.stopping)
        if rows is None:
            return 0
        batches = Batches(captioner, seed, indices, captions, questions, PROMPTS)
        checks = Checks(captioner, seed, VALIDATION[:checked])
        model.requires_grad_(False)
        trained = [(n, p.requires_grad_()) for n, p in model.named_parameters() if not n.startswith(FROZEN)]

        def losses(step: int) -> Iterator[tuple[str, float, Tensor]]:
            for name, weight, batch in (
                ("caption", 1.0, batches.told(step)),
                ("answer", ANSWERS, batches.asked(step)),
            ):
                with computing(dtype):
                    seen = torch.from_numpy(rows[batch.rows]).float()
                    loss = cross_entropy(captioner.logits(seen, batch.prompts, batch.targets), batch.targets)
                yield name, weight, loss

        def check() -> dict[str, Any]:
            found = checks.figures()
            save_bundle(model, tokenizer, out / "model", LONGEST)
            return found

        plan = Schedule(steps, lr, stop_at, check_every)
        return run_steps(run, plan, model, trained, losses, check, dtype)
