"""The training of the language model: the tower frozen, texts drawn anew for every step, no deep supervision.

It begins with captions and roll calls (`common/roll_call.py`), a step of which takes less than half as long as one with everything: what a
row says, where a thing stands and how one is found by its kind is learned there, and sooner without the noise of short answers;
those, and what moved or differs, build on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from vlmexport.calibration.data.scenes.dataset import film_pictures, resized
from vlmexport.calibration.data.scenes.film import FRAMES
from vlmexport.calibration.data.scenes.pair import sample_pair
from vlmexport.calibration.data.scenes.scene import TRAIN, VALIDATION

from ..common.ahead import drawn_ahead
from ..common.attention import use_dense_attention
from ..common.captioner import LONGEST
from ..common.checks import Checks
from ..common.emphasis import ALONE, emphasis, seen_ids
from ..common.folder import digest
from ..common.long_run import LongRun
from ..common.loop import Part, Schedule, learning, run_steps
from ..common.packed_batches import QUESTIONS, Batch
from ..common.packed_loss import part_of
from ..common.rows import image_rows, stored_rows
from ..precision import computing, dtype_of
from .batches import Batches
from .captioner import Qwen25VL
from .checks import ViewChecks
from .layer_dropout import rates, without
from .layout import PAIR, film_media
from .model import FROZEN, build_model, save_bundle
from .teacher import Teacher
from .tokenizer import build_tokenizer
from .tower import FRAMES as TOGETHER
from .tower import WIDTH

PASSES = 2
"""Forward passes that a step's pictures are split into: the activations of one must fit beside the rest into 3 GB."""
WEIGHTS = {"pair_answer": 0.8, "story": 0.5}
"""Of losses; of the others 1."""


@dataclass(frozen=True)
class LanguageStage:
    """Settings of the training.

    Args:
        steps, lr, stop_at, check_every: see `Schedule`.
        pictures: training scenes; each is used plain and mirrored. pairs, films: how many of each are rendered.
        sizes: pictures (a multiple of `PASSES`), pairs and films of a step. seed: of weights, scenes and draws.
        precision: see `recipes.precision`. checked: validation scenes, pairs and films of a check.
        save_every: seconds between two saves of the state.
        start: the state of a training that this one goes on from, with fresh optimizers: the last stage. It learns from everything
            at once and in equal weights, with layer dropout, and draws what comes behind the steps of that training.
        device: "cpu" or "cuda", of the steps. workers: processes that make the rows and, for a GPU, draw batches; not the
            device nor their number changes what is drawn.
    """

    steps: int
    pictures: int = 32_000
    pairs: int = 8_000
    films: int = 12_000
    sizes: tuple[int, int, int] = (32, 8, 12)
    lr: float = 3e-3
    seed: int = 0
    precision: str = "auto"
    stop_at: int | None = None
    check_every: int = 250
    checked: int = 96
    save_every: float = 300.0
    start: Path | None = None
    device: str = "cpu"
    workers: int = 1

    def train(self, out: Path, data: Path, vision: Path, teacher: Teacher) -> int:
        """Runs or continues the training; returns the step that was reached, 0 where it was stopped before the first.

        `out` receives ``state.pt``, ``log.jsonl`` and, at every check, ``model``.

        Args:
            data: receives the tower's rows, and is looked up for them. vision: state of `vision_stage.train_vision`, whose tower is taken. teacher: whose rows it learned.

        Raises:
            OptionError: see `LongRun`.
        """
        dtype, tokenizer = dtype_of(self.precision, self.device), build_tokenizer()
        model = build_model(tokenizer, self.seed).eval()
        take_tower(model, vision, teacher)
        use_dense_attention(model.model.language_model)
        captioner, begun = Qwen25VL(model, tokenizer), digest(vision)
        settings = {
            "steps": self.steps,
            "vision": begun,
            "pictures": self.pictures,
            "pairs": self.pairs,
            "films": self.films,
            "sizes": list(self.sizes),
            "questions": QUESTIONS,
            "lr": self.lr,
            "seed": self.seed,
            "vocabulary": len(tokenizer),
        }
        begin = 0
        if self.start is not None:
            state = torch.load(self.start, weights_only=True, map_location="cpu")
            model.load_state_dict(state["model"], strict=False)
            begin = state["step"]
            settings["start"] = digest(self.start)
        with LongRun(out, settings, self.save_every) as run:
            stores = self._rows(captioner, data, begun, lambda: run.stopping)
            if stores is None:
                return 0
            shown, paired, filmed = self.sizes
            sizes = (shown // PASSES, paired, filmed)
            batches = Batches(captioner, self.seed, self.pictures, self.pairs, self.films, sizes)
            span = VALIDATION[: self.checked]
            checks, views = Checks(captioner, self.seed, span), ViewChecks(captioner, self.seed, span)
            nn.Module.to(model, self.device)
            trained, seen = learning(model, FROZEN), seen_ids(tokenizer).to(self.device)
            first = ((PASSES, batches.of_captions, stores["pictures"], ("caption", "", "roll_call")),)
            later = (
                (PASSES, batches.of_pictures, stores["pictures"], ("caption", "answer", "roll_call")),
                (1, batches.of_pairs, stores["pairs"], ("", "pair_answer", "")),
                (1, batches.of_films, stores["films"], ("story", "film_answer", "film_call")),
            )

            def kinds(step: int) -> Any:
                return first if self.start is None and step < int(ALONE * self.steps) else later

            def draw(step: int) -> list[Batch]:
                return [
                    one(passes * (begin + step) + turn)
                    for passes, one, _, _ in kinds(step)
                    for turn in range(passes)
                ]

            last = min(self.steps, self.stop_at or self.steps)
            drawn = drawn_ahead(draw, last, self.workers if self.device == "cuda" else 0)

            chances = rates(len(captioner.layers)) * (self.start is not None)

            def losses(step: int) -> Iterator[Part]:
                weight = emphasis(step, self.steps) if self.start is None else 1.0
                batch_iterator, rng = iter(drawn(step)), np.random.default_rng([self.seed, 31, step])
                for passes, _, known, names in kinds(step):
                    for _ in range(passes):
                        left_out = rng.random(len(chances)) < chances
                        with computing(dtype, self.device), without(captioner.layers, left_out):
                            part = part_of(captioner, next(batch_iterator), known, names, seen, weight)
                        yield {
                            name: (share * WEIGHTS.get(name, 1.0), value / passes)
                            for name, (share, value) in part.items()
                        }

            def check() -> dict[str, Any]:
                figures = checks.figures() | views.figures()
                save_bundle(model, tokenizer, out / "model", LONGEST)
                return figures

            plan = Schedule(self.steps, self.lr, self.stop_at, self.check_every)
            return run_steps(run, plan, model, trained, losses, check, dtype)

    def _rows(
        self, captioner: Qwen25VL, data: Path, origin: str, stopping: Callable[[], bool]
    ) -> dict[str, np.ndarray] | None:
        """The tower's rows of all that is learned from; None where it was stopped before they were complete."""
        side, seed = captioner.side, self.seed

        def pairs(store: np.ndarray, start: int, stop: int) -> None:
            shown = [resized(s, side) for i in TRAIN[start:stop] for s in sample_pair(seed, i).scenes]
            store[start:stop] = (
                captioner.rows(np.stack(shown)).reshape(stop - start, PAIR.rows, WIDTH).numpy()
            )

        def films(store: np.ndarray, start: int, stop: int) -> None:
            for row in range(start, stop):  # shorter films leave the end of their places zero
                embeds = film_rows(captioner, seed, TRAIN[row])
                store[row, : len(embeds)] = embeds.numpy()

        most = film_media(max(FRAMES)).rows
        stores = {
            "pictures": image_rows(
                data / f"pictures-{origin}-{seed}-{self.pictures}.f16",
                captioner,
                seed,
                TRAIN[: self.pictures],
                stopping,
                self.workers,
            )
        }
        for name, count, held, write in (
            ("pairs", self.pairs, PAIR.rows, pairs),
            ("films", self.films, most, films),
        ):
            if stopping():
                return None
            path = data / f"{name}-{origin}-{seed}-{count}.f16"
            stores[name] = stored_rows(path, (count, held, WIDTH), count, write, stopping, self.workers)
        complete = {name: store for name, store in stores.items() if store is not None}
        return complete if len(complete) == len(stores) else None


def film_rows(captioner: Qwen25VL, seed: int, index: int) -> torch.Tensor:
    """The tower's rows [n, width] of all frames of a film."""
    frames = film_pictures(seed, index, captioner.side)
    return captioner.pair_rows(frames.reshape(-1, TOGETHER, *frames.shape[1:])).flatten(0, 1)


def take_tower(model: Any, vision: Path, teacher: Teacher) -> None:
    """Copies the tower of a vision stage's state into a model, so that it gives the rows of the teacher as they are."""
    state = torch.load(vision, weights_only=True, map_location="cpu")["model"]
    tower = {n.removeprefix("tower."): p for n, p in state.items() if n.startswith("tower.")}
    model.model.visual.load_state_dict(tower)
    teacher.turn_back(model.model.visual.merger.mlp[-1])
