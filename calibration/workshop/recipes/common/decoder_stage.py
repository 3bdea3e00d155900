"""The training of a decoder: rows of the frozen image side, texts drawn anew for every step, no deep supervision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...precision import computing, dtype_of
from ...scenes.scene import TRAIN, VALIDATION
from .batches import Batches
from .captioner import LONGEST, Captioner, cross_entropy
from .checks import Checks
from .long_run import LongRun
from .loop import Part, Schedule, learning, run_steps
from .rows import image_rows

ANSWERS = 0.3  # weight of the answers' loss


@dataclass(frozen=True)
class DecoderStage:
    """What of a training does not depend on the model.

    Args:
        steps, lr, stop_at, check_every: see `Schedule`.
        pictures: training scenes; each is used plain and mirrored.
        captions, questions: of a step; questions only where the model answers any. seed: of weights, scenes and draws.
        precision: see `workshop.precision`.
        checked: validation scenes of a check.
        save_every: seconds between two saves of the state.
    """

    steps: int
    pictures: int = 64_000
    captions: int = 64
    questions: int = 64
    lr: float = 3e-3
    seed: int = 0
    precision: str = "auto"
    stop_at: int | None = None
    check_every: int = 250
    checked: int = 128
    save_every: float = 300.0

    def train(
        self,
        out: Path,
        captioner: Captioner,
        frozen: tuple[str, ...],
        begun: dict[str, str],
        save: Callable[[Any, Any, Path, int], None],
        prompts: Sequence[str] = (),
    ) -> int:
        """Runs or continues the training; returns the step that was reached, 0 where it was stopped before the first.

        `out` receives ``data`` (image rows), ``state.pt``, ``log.jsonl`` and, at every check, ``model``.

        Args:
            captioner: with the model as it begins. frozen: what names of parameters begin with that do not learn.
            begun: name of the setting that says what the model began with, and its value.
            save: of the recipe: (model, tokenizer, folder, longest caption). prompts: see `Batches`.

        Raises:
            OptionError: see `LongRun`.
        """
        dtype, model, asks = dtype_of(self.precision), captioner.model, captioner.asks
        settings = {
            "steps": self.steps,
            **begun,
            "pictures": self.pictures,
            "captions": self.captions,
            **({"questions": self.questions} if asks else {}),
            "lr": self.lr,
            "seed": self.seed,
            "vocabulary": len(captioner.tokenizer),
        }
        indices = TRAIN[: self.pictures]
        with LongRun(out, settings, self.save_every) as run:
            (origin,) = begun.values()
            path = out / "data" / f"rows-{origin}-{self.seed}-{self.pictures}.f16"
            rows = image_rows(path, captioner, self.seed, indices, lambda: run.stopping)
            if rows is None:
                return 0
            batches = Batches(captioner, self.seed, indices, self.captions, self.questions, prompts)
            checks = Checks(captioner, self.seed, VALIDATION[: self.checked])
            parts = [("caption", 1.0, batches.told), *([("answer", ANSWERS, batches.asked)] if asks else [])]
            trained = learning(model, frozen)

            def losses(step: int) -> Iterator[Part]:
                for name, weight, draw in parts:
                    batch = draw(step)
                    with computing(dtype):
                        seen = torch.from_numpy(rows[batch.rows]).float()
                        loss = cross_entropy(
                            captioner.logits(seen, batch.prompts, batch.targets), batch.targets
                        )
                    yield {name: (weight, loss)}

            def check() -> dict[str, Any]:
                found = checks.figures()
                save(model, captioner.tokenizer, out / "model", LONGEST)
                return found

            plan = Schedule(self.steps, self.lr, self.stop_at, self.check_every)
            return run_steps(run, plan, model, trained, losses, check, dtype)
