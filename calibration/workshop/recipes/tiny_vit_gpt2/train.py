"""The training of the decoder: the image tower frozen, captions drawn anew for every step, no deep supervision."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...precision import computing, dtype_of
from ...scenes.scene import TRAIN, VALIDATION
from ..common.batches import Batches
from ..common.captioner import LONGEST, cross_entropy
from ..common.checks import Checks
from ..common.long_run import LongRun
from ..common.loop import Schedule, run_steps
from ..common.rows import image_rows
from .captioner import ViTGPT2
from .model import FROZEN, build_model, save_bundle
from .tokenizer import build_tokenizer
from .tower import take_tower


def train(
    out: Path,
    steps: int,
    tower: Path,
    pictures: int = 64_000,
    captions: int = 64,
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
        tower: folder of a trained `tiny-blip2-flant5`, whose image tower is taken.
        pictures: training scenes; each is used plain and mirrored.
        captions: of a step. seed: of weights, scenes and draws.
        precision: see `workshop.precision`.
        checked: validation scenes of a check.
        save_every: seconds between two saves of the state.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype = dtype_of(precision)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed).eval()
    begun = take_tower(model, tower)
    captioner = ViTGPT2(model, tokenizer)
    settings = {
        "steps": steps,
        "tower": begun,
        "pictures": pictures,
        "captions": captions,
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
        batches = Batches(captioner, seed, indices, captions)
        checks = Checks(captioner, seed, VALIDATION[:checked])
        blocks: Any = captioner.layers
        for block in blocks:  # GPT-2's gelu_new as one operator: an eighth of a step's time
            block.mlp.act = nn.GELU(approximate="tanh")
        model.requires_grad_(False)
        trained = [(n, p.requires_grad_()) for n, p in model.named_parameters() if not n.startswith(FROZEN)]

        def losses(step: int) -> Iterator[tuple[str, float, Tensor]]:
            batch = batches.told(step)
            with computing(dtype):
                seen = torch.from_numpy(rows[batch.rows]).float()
                loss = cross_entropy(captioner.logits(seen, batch.prompts, batch.targets), batch.targets)
            yield "caption", 1.0, loss

        def check() -> dict[str, Any]:
            found = checks.figures()
            save_bundle(model, tokenizer, out / "model", LONGEST)
            return found

        plan = Schedule(steps, lr, stop_at, check_every)
        return run_steps(run, plan, model, trained, losses, check, dtype)
