"""Makes an imitation draft for SmolLM2-135M-Instruct at n = 10 from the model's own answers.

    python -m recipes.smollm2_draft --model runs/smollm2 --work runs/smollm2-draft \\
        --out runs/smollm2-n10 --minutes 120

`benchmarks/smollm2.py` makes the checkpoint; any text-only Llama with a chat template works. Not quite half of
--minutes goes to the model's answers, the rest to its cached rows, the training and the evaluation on held-out
topics. The same command continues a killed run: WORK keeps what is done, OUT receives the draft (fp16).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.evaluation.acceptance import Acceptance
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.generate import generate_data
from vlmexport.calibration.generation.torch_answers import TorchAnswers
from vlmexport.calibration.objectives import objective_for
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.calibration.training.trainer import Trainer
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.runtime.common.atomic_files import atomic_write
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.hardware.machine import cores

from .smollm2_prompts import chat_prompts
from .workshop import COMPARED, DRAFT_LENGTH, Workshop, cached_features

PART = 64  # prompts that are answered between two looks at the clock
ANSWER_SHARE, RESERVE = 0.45, 0.05  # of the time: for answers, and kept for the evaluation
GENERATION_BATCH = 32  # records; a GPU answers a whole part together
BATCH = 8  # records; a vocabulary of 49,152 makes logits the largest tensors
VALIDATION = 64  # records, at most; 5 % of a smaller set
LEAST_STEPS, MOST_STEPS = 50, 4000
LEARNING_RATE = 1e-2  # after 120 steps the validation loss is 11.8, 10.0 and 8.8 at 1e-3, 3e-3 and 1e-2
VALIDATIONS = 5  # per run


@dataclass(frozen=True)
class Limits:
    """What decides the result, apart from the model and the speed of the machine."""

    layer: int = 10
    minutes: float = 120.0
    prompts: int | None = None  # None: all
    heldout: int = 128
    new_tokens: int = 128
    steps: int | None = None  # None: as many as the rest of the time allows


class Progress:
    """`recipe.json`: limits, seconds by stage (also over kills), and what was decided on the way.

    With `read_only`, what is done is found there and nothing is added to the account.
    """

    def __init__(self, folder: Path, limits: Limits, read_only: bool = False) -> None:
        self.path, self.read_only = folder / "recipe.json", read_only
        self.record: dict[str, Any] = {"limits": asdict(limits), "seconds": {}}
        if self.path.exists():
            self.record = json.loads(self.path.read_text("utf-8"))
        for name, value in asdict(limits).items():
            if self.record["limits"].get(name) != value:
                raise OptionError(
                    f"{folder} holds a run with {name} = {self.record['limits'].get(name)!r}, this one has "
                    f"{value!r}; give another --work"
                )
        self._stage, self._since = "", 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time inside for stage `name`."""
        self._stage, self._since = name, time.perf_counter()
        yield
        self.tick()

    def tick(self) -> None:
        """Writes the time until now, so that a kill loses little of the account."""
        now = time.perf_counter()
        seconds = self.record["seconds"]
        seconds[self._stage] = round(seconds.get(self._stage, 0.0) + now - self._since, 3)
        self._since = now
        self.note()

    def note(self, **values: Any) -> None:
        """Keeps decisions and results."""
        self.record |= values
        if self.read_only:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as out:
            out.write((json.dumps(self.record, indent=1) + "\n").encode())

    @property
    def spent(self) -> float:
        """Seconds of all stages."""
        return sum(self.record["seconds"].values())


def make_draft(model: str, work: Path, out: Path, limits: Limits, device: str = "auto") -> dict[str, Any]:
    """Runs, continues or (when complete) rereads the recipe; returns the line that the command prints.

    Raises:
        OptionError: `work` holds a run with other limits; the model has no such layer.
    """
    target = load_target(model, device)
    target.check_layer(limits.layer)
    place = _place(target, work)
    progress = Progress(place, limits)
    if "result" not in progress.record or not (out / "draft.json").exists():
        workshop = _prepare(target, place, limits, progress)
        draft = _train(workshop, place, limits, progress)
        progress.note(result=_evaluate(workshop, draft, out, limits, progress))
    seconds = progress.record["seconds"]
    return {
        **progress.record["result"],
        "seconds": {k: round(v, 1) for k, v in seconds.items()},
        "minutes": round(progress.spent / 60, 2),
        "draft": str(out),
    }


def reopen(model: str, work: Path, device: str = "auto") -> Workshop:
    """The cached hidden states of a finished run in `work`, whatever its limits were. OptionError if there is none."""
    target = load_target(model, device)
    place = _place(target, work)
    path = place / "recipe.json"
    record = json.loads(path.read_text("utf-8")) if path.exists() else {}
    if "result" not in record:
        raise OptionError(f"{work} holds no finished run for {target.name}; run the recipe to its end first")
    limits = Limits(**record["limits"])
    return _prepare(target, place, limits, Progress(place, limits, read_only=True))


def _place(target: Target, work: Path) -> Path:
    return work / target.fingerprint.removeprefix("sha256:")[:12]


def _prepare(target: Target, place: Path, limits: Limits, progress: Progress) -> Workshop:
    """Answers, and their hidden states at the draft layer; those that are held out too, so that what is left of the time is known."""
    records, heldout = _answers(target, place, limits, progress)
    told, checked = records.split(min(0.05, VALIDATION / len(records)))
    with progress.stage("cache"):
        features = cached_features(target, told, checked, heldout, [limits.layer], place / "features")
        _say(f"rows of {len(features[limits.layer].heldout)} held-out answers")
    return Workshop(target, features, records.identity(), BATCH, LEARNING_RATE)


def _answers(target: Target, place: Path, limits: Limits, progress: Progress) -> tuple[RecordSet, RecordSet]:
    """The target's answers to held-out prompts, then to as many training prompts as the time allows."""
    told = chat_prompts()
    prompts, heldout = told[0][: limits.prompts], told[1][: limits.heldout]
    if len(prompts) < 2 or not heldout:
        raise OptionError(
            f"--prompts {limits.prompts} and --heldout {limits.heldout}: at least 2 and 1 are needed"
        )
    with progress.stage("answers"):
        checked = _answer(target, heldout, place, "heldout", limits.new_tokens)
        progress.tick()
        parts, at, budget = [], 0, ANSWER_SHARE * 60 * limits.minutes
        # Once decided, the number stays: a resumed training must see the same data.
        last = progress.record.get("answered", len(prompts))
        while at < last and (not parts or "answered" in progress.record or progress.spent < budget):
            chunk = prompts[at : min(at + PART, last)]
            parts.append(_answer(target, chunk, place, f"train-{at:05d}", limits.new_tokens))
            at += len(chunk)
            progress.tick()
            _say(
                f"answered {at}/{last} prompts, {progress.spent / 60:.1f} of {limits.minutes:g} minutes spent"
            )
        progress.note(answered=at)
    records = [record for part in parts for record in part]
    return RecordSet("composed chat prompts", records, [], parts[0].generated_by), checked


def _answer(target: Target, prompts: list[str], place: Path, name: str, new_tokens: int) -> RecordSet:
    """Answers of one piece, which is written whole or not at all; keys are unique over the pieces."""
    path, folder = place / "prompts" / f"{name}.jsonl", place / "answers" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts), "utf-8")
    requests = load_records(str(path), strict=True)
    requests = RecordSet(name, [replace(r, key=f"{name}/{r.key}") for r in requests])
    options = GenerationOptions(new_tokens)
    batch = GENERATION_BATCH if target.device.type == "cpu" else PART
    generate_data(
        TorchAnswers(target, batch), requests, folder, options, len(prompts), report=lambda line: None
    )
    return load_records(str(folder), strict=True)


def _train(workshop: Workshop, place: Path, limits: Limits, progress: Progress) -> ImitationDraft:
    """The best draft of a run that fills the time but for the evaluation's share."""
    target, features = workshop.target, workshop.features[limits.layer]

    def trainer(steps: int, out: Path) -> Trainer:
        kind = ImitationOptions(limits.layer, **COMPARED)  # type: ignore[arg-type]
        options = LoopOptions(steps, BATCH, LEARNING_RATE, warmup=min(50, steps // 10))
        often = max(1, steps // VALIDATIONS)
        return Trainer(
            partial(objective_for, kind), options, target, features.train, features.validation, workshop.data, out,
            eval_every=often, save_every=min(often, 50), log_every=10, report=report,
            device=target.device,
        )  # fmt: skip

    def report(line: str) -> None:
        progress.tick()
        _say(line)

    with progress.stage("train"):
        steps = limits.steps or progress.record.get("steps")
        if steps is None:
            probe, timed = trainer(10**6, place / "probe"), 4
            probe.train(stop_after=1)
            clock = time.perf_counter()
            probe.train(stop_after=timed)
            step = (time.perf_counter() - clock) / timed
            progress.tick()
            left = 60 * limits.minutes * (1 - RESERVE) - progress.spent
            # A validation batch has no backward pass: about half a step.
            extra = VALIDATIONS * -(-len(features.validation) // BATCH) * 0.5
            steps = int(min(MOST_STEPS, max(LEAST_STEPS, left / step - extra)))
            _say(f"{step:.2f} s a step: {steps} steps")
        progress.note(steps=steps)
        draft = trainer(steps, place / f"run-n{limits.layer}").train()
        assert isinstance(draft, ImitationDraft)
        return draft


def _evaluate(
    workshop: Workshop, draft: ImitationDraft, out: Path, limits: Limits, progress: Progress
) -> dict[str, Any]:
    """Writes the draft and measures it as stored, next to the early exit at the same layer."""
    with progress.stage("evaluation"):
        draft.save(out, torch.float16)
        stored = ImitationDraft.load(out)
        networks = {"imitation": stored.network, "early_exit": nn.Identity()}
        figures = {k: _figures(workshop.heldout(limits.layer, n)) for k, n in networks.items()}
        line = {"model": workshop.target.name, "layer": limits.layer, "draft_length": DRAFT_LENGTH}
        line |= figures["imitation"] | {"early_exit": figures["early_exit"]}
        line |= {"heldout": len(workshop.features[limits.layer].heldout)}
        line |= {"answered": progress.record["answered"], "steps": progress.record["steps"]}
        replace(stored, evaluation=draft.evaluation | {"heldout": line}).save(out, torch.float16)
    return line


def _figures(result: Acceptance) -> dict[str, Any]:
    return {
        "alpha": round(result.alpha, 5),
        "tau": round(result.tau, 4),
        "overlap": round(result.overlap, 5),
        "tokens": result.tokens,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Command line of the recipe: progress on standard error, one JSON line on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the checkpoint, alias or hub id")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=Limits.minutes, help="for everything")
    parser.add_argument("--layer", type=int, default=Limits.layer, help="n: the draft follows layer n")
    parser.add_argument("--prompts", type=int, help="at most so many training prompts")
    parser.add_argument("--heldout", type=int, default=Limits.heldout, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=Limits.new_tokens, help="limit per answer")
    parser.add_argument("--steps", type=int, help="in place of what the time allows")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--device", default="auto", help="auto: a GPU where PyTorch finds one")
    options = vars(parser.parse_args(arguments))
    torch.set_num_threads(options.pop("threads"))
    model, work, out, device = (options.pop(name) for name in ("model", "work", "out", "device"))
    print(json.dumps(make_draft(model, work, out, Limits(**options), device)))


if __name__ == "__main__":
    main()
