"""The training of a decoder: embeddings of the frozen image side, texts drawn anew for every step, no deep supervision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from vlmexport.calibration.data.scenes.scene import TRAIN, VALIDATION

from ..precision import computing, dtype_of
from .ahead import drawn_ahead
from .batches import Batch, Batches
from .captioner import LONGEST, Captioner
from .checks import Checks
from .long_run import LongRun
from .loop import Part, Schedule, learning, run_steps
from .rows import image_rows


class Texts(Protocol):
    """What a decoder learns, step by step, and how that is measured."""

    def draw(self, step: int) -> Any:
        """The batches of a step, on the CPU: for a GPU other processes draw them."""
        ...

    def losses(self, step: int, drawn: Any, stored: np.ndarray) -> Iterator[Part]:
        """As `run_steps` takes them, of what `draw` gave; `stored` are the rows of all pictures."""
        ...

    def figures(self) -> dict[str, Any]:
        """Further ones of a check, beside those of `Checks`."""
        ...


@dataclass(frozen=True)
class DecoderStage:
    """What of a training does not depend on the model.

    Args:
        steps, lr, stop_at, check_every: see `Schedule`.
        pictures: training scenes; each is used plain and mirrored.
        captions, questions: of a step; questions only where the model answers any. seed: of weights, scenes and draws.
        precision: see `recipes.precision`.
        checked: validation scenes of a check.
        save_every: seconds between two saves of the state.
        device: "cpu" or "cuda", of the rows and the steps; for captioners that compute where their model lies. workers: processes
            that draw batches for a GPU. Neither changes what is drawn.
        answers: weight of the answers' loss; that of the captions is 1. optimizer: see `Schedule`.
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
    device: str = "cpu"
    workers: int = 1
    answers: float = 0.3
    optimizer: str = "muon"

    def train(
        self,
        out: Path,
        captioner: Captioner,
        frozen: tuple[str, ...],
        begun: dict[str, Any],
        save: Callable[[Any, Any, Path, int], None],
        prompts: Sequence[str] = (),
        shown: np.ndarray | None = None,
    ) -> int:
        """Runs or continues the training; returns the step that was reached, 0 where it was stopped before the first.

        `out` receives ``data`` (image rows), ``state.pt``, ``log.jsonl`` and, at every check, ``model``.

        Args:
            captioner: with the model as it begins. frozen: what names of parameters begin with that do not learn.
            begun: names and values of the settings that say what the model began with; the first is of its image side.
            save: of the recipe: (model, tokenizer, folder, longest caption). prompts: see `Batches`.
            shown: the pictures, where they are rendered already: uint8 (pictures, side, side, 3).

        Raises:
            OptionError: see `LongRun`.
        """
        dtype, model, asks = dtype_of(self.precision, self.device), captioner.model, captioner.asks
        settings = {
            "steps": self.steps,
            **begun,
            "pictures": self.pictures,
            "captions": self.captions,
            **({"questions": self.questions} if asks else {}),
            "lr": self.lr,
            "optimizer": self.optimizer,
            "seed": self.seed,
            "vocabulary": len(captioner.tokenizer),
        }
        indices = TRAIN[: self.pictures]
        with LongRun(out, settings, self.save_every) as run:
            model.to(self.device)
            origin = next(iter(begun.values()))
            path = out / "data" / f"rows-{origin}-{self.seed}-{self.pictures}.f16"
            stored_embeds = image_rows(path, captioner, self.seed, indices, lambda: run.stopping, shown=shown)
            if stored_embeds is None:
                return 0
            texts = self.texts(captioner, prompts)
            checks = Checks(captioner, self.seed, VALIDATION[: self.checked])
            trained = learning(model, frozen)

            last = min(self.steps, self.stop_at or self.steps)
            drawn = drawn_ahead(texts.draw, last, self.workers if self.device == "cuda" else 0)

            def losses(step: int) -> Iterator[Part]:
                return texts.losses(step, drawn(step), stored_embeds)

            def check() -> dict[str, Any]:
                figures = checks.figures() | texts.figures()
                save(model, captioner.tokenizer, out / "model", LONGEST)
                return figures

            plan = Schedule(self.steps, self.lr, self.stop_at, self.check_every, self.optimizer)
            return run_steps(run, plan, model, trained, losses, check, dtype)

    def texts(self, captioner: Captioner, prompts: Sequence[str]) -> Texts:
        """What is learned: captions and, where the model answers any, questions, every text in a sequence of its own."""
        return SingleTexts(self, captioner, prompts)


class SingleTexts:
    """See `DecoderStage.texts`."""

    def __init__(self, stage: DecoderStage, captioner: Captioner, prompts: Sequence[str]) -> None:
        self.stage, self.captioner = stage, captioner
        indices = TRAIN[: stage.pictures]
        batches = Batches(captioner, stage.seed, indices, stage.captions, stage.questions, prompts)
        self.parts = [
            ("caption", 1.0, batches.told),
            *([("answer", stage.answers, batches.asked)] if captioner.asks else []),
        ]

    def draw(self, step: int) -> list[Batch]:
        """See `Texts`."""
        return [one(step) for _, _, one in self.parts]

    def losses(self, step: int, drawn: list[Batch], stored: np.ndarray) -> Iterator[Part]:
        """See `Texts`."""
        dtype = dtype_of(self.stage.precision, self.stage.device)
        for (name, weight, _), batch in zip(self.parts, drawn, strict=True):
            with computing(dtype, self.stage.device):
                seen = torch.from_numpy(stored[batch.rows]).float()
                loss = self.captioner.loss(seen, batch.prompts, batch.targets)
            yield {name: (weight, loss)}

    def figures(self) -> dict[str, Any]:
        """None."""
        return {}
