"""The training of the language model: the vision side frozen, texts drawn anew for every step, no deep supervision."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from transformers import Blip2ForConditionalGeneration, PreTrainedTokenizerBase

from ...precision import computing, dtype_of
from ...scenes.scene import TRAIN, VALIDATION
from ..long_run import LongRun
from .batches import Batches
from .checks import Checks
from .language import LONGEST, cross_entropy, logits
from .model import FROZEN, save_bundle
from .optimizer import build_optimizers, schedule
from .rows import image_rows
from .start import begin
from .tokenizer import build_tokenizer

ANSWERS = 0.3  # weight of the answers' loss
WARMUP = 100


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
    """Runs or continues the training; returns the step that was reached.

    `out` receives ``data`` (image rows), ``state.pt``, ``log.jsonl`` and, at every check, ``model``.

    Args:
        steps: of the whole schedule.
        start: see `start.begin`; None takes ``out/vision/state.pt``, which the vision stage writes.
        pictures: training scenes; each is used plain and mirrored.
        captions, questions: of a step. lr: peak learning rate. seed: of weights, scenes and draws.
        precision: see `workshop.precision`.
        stop_at: end, with the state saved, after so many steps of the schedule.
        check_every: steps between two lines of `Checks` in the log. checked: validation scenes of a check.
        save_every: seconds between two saves of the state.

    Raises:
        OptionError: see `LongRun`.
    """
    dtype = dtype_of(precision)
    tokenizer = build_tokenizer()
    model, begun = begin(tokenizer, seed, start, out / "vision" / "state.pt")
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
        rows = image_rows(out / "data" / f"rows-{begun}-{seed}-{pictures}.f16", model, seed, indices)
        batches = Batches(tokenizer, seed, indices, captions, questions)
        checks = Checks(model, tokenizer, seed, VALIDATION[:checked])
        model.requires_grad_(False)
        trained = [(n, p.requires_grad_()) for n, p in model.named_parameters() if not n.startswith(FROZEN)]
        optimizers = build_optimizers(trained, lr, dtype)
        first = _resume(run, model, optimizers)
        clock, busy = time.time(), time.process_time()
        sums = {"caption": 0.0, "answer": 0.0}
        done, last = 0, min(steps, stop_at or steps)
        for step in range(first, last):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * schedule(step, steps, WARMUP)
            loss = torch.zeros(())
            for name, weight, batch in (
                ("caption", 1.0, batches.told(step)),
                ("answer", ANSWERS, batches.asked(step)),
            ):
                with computing(dtype):
                    seen = torch.from_numpy(rows[batch.rows]).float()
                    part = cross_entropy(logits(model, seen, batch.prompts, batch.targets), batch.targets)
                loss = loss + weight * part
                sums[name] += part.item()
            loss.backward()
            nn.utils.clip_grad_norm_([p for _, p in trained], 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            done, at = done + 1, step + 1
            ending = at == last or run.stopping
            if at % 25 == 0 or ending:
                line = {"step": at} | {n: round(v / done, 4) for n, v in sums.items()}
                line |= {
                    "seconds": round(time.time() - clock, 1),
                    "cpu_seconds": round(time.process_time() - busy, 1),
                    "seconds_per_step": round((time.time() - clock) / done, 3),
                }
                if at % check_every == 0 or at == last:
                    line |= checks.figures(model)
                    publish(model, tokenizer, out / "model")
                run.log(line)
                clock, busy, done = time.time(), time.process_time(), 0
                sums = dict.fromkeys(sums, 0.0)
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


def publish(model: Blip2ForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes the model folder as it stands."""
    save_bundle(model, tokenizer, folder, LONGEST)


def _resume(
    run: LongRun, model: Blip2ForConditionalGeneration, optimizers: list[torch.optim.Optimizer]
) -> int:
    """Loads the state if there is one; no draw has a state of its own, all are keyed by the step."""
    state = run.load()
    if state is None:
        return 0
    model.load_state_dict(state["model"], strict=False)
    for optimizer, stored in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(stored)
    return state["step"]
