"""Makes the drafts that ship with a bundled model: imitation networks at a quarter and at half of its decoder's layers,
Medusa heads, and layers of EAGLE and of ViSpec for a decoder that reads pictures among its rows.

    python -m recipes.tiny_drafts --model tiny-blip2-flant5 --work WORK --out DRAFTS

WORK receives the target's own answers, the cached rows and the runs; everything in it is reused, so an
interrupted recipe continues. DRAFTS receives a folder a draft, ``n3``, ``medusa``, ``vispec`` (fp16). They learn from, and
are measured on, all that the model is asked for: captions and answers, of one that reads films and pairs of pictures these too
(``--forms``). A model that takes no prompt learns from captions only. ``benchmarks/papers_fastvlm_table1.py`` uses the same WORK. For a model with a vocabulary of real texts, in which
heads and rows of logits are large, ``--kinds imitation --batch-size 8`` makes the networks alone.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.scenes.load import FORMS, TASKS
from vlmexport.calibration.evaluation.acceptance import Acceptance
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.generation.answers import GenerationOptions
from vlmexport.calibration.generation.engine import open_answers
from vlmexport.calibration.generation.generate import generate_data
from vlmexport.calibration.objectives import options_of
from vlmexport.calibration.objectives.imitation_options import ImitationOptions
from vlmexport.calibration.objectives.medusa_options import MedusaOptions
from vlmexport.calibration.objectives.training_options import LoopOptions
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.drafts.common.trained import TrainedDraft
from vlmexport.exporter.drafts.eagle.vispec import check_family
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.runtime.common.errors import ExportError, OptionError
from vlmexport.runtime.hardware.machine import cores
from vlmexport.runtime.speedup.stats import Stats

from .common.captioner import LONGEST
from .layer_stages import LAYERS, train_in_stages, whole_answers
from .models import captioner_of
from .workshop import DRAFT_LENGTH, Answers, Workshop, cached_features

MODEL = "tiny-blip2-flant5"
CAPTIONS, QUESTIONS, VALIDATION, HELDOUT = 4096, 2048, 256, 1000
KINDS = ("imitation", "medusa", "layers")
STEPS, BATCH = 1500, 64
HEADS = MedusaOptions(heads=4, head="own")
HEAD_STEPS = 1500
LAYER_STEPS, LAYER_BATCH = 1500, 32
TOLD = 64_000  # scenes of `train` that the target has learned from; drafts take later ones


def prepare(
    model: str,
    work: Path,
    captions: int = CAPTIONS,
    heldout: int = HELDOUT,
    device: str = "auto",
    batch: int = BATCH,
    forms: Sequence[str] | None = None,
) -> Workshop:
    """Lets the target answer training, validation and held-out scenes, and caches its rows.

    `forms` are what it is asked for (`Captioner.forms`), by default what is about single pictures. Drafts are chosen by
    descriptions, in which nearly all tokens are.

    Raises OptionError for forms without captions, or ones that the target does not answer.
    """
    target = load_target(model, device)
    kind = captioner_of(target.checkpoint.architecture)
    captioned = kind.captions_form()
    asked = [form for form in kind.forms() if form.startswith("scenes")] if forms is None else list(forms)
    if captioned not in asked or not set(asked) <= set(kind.forms()):
        raise OptionError(
            f"--forms {' '.join(asked)}: {target.name} needs {captioned}, and answers {', '.join(kind.forms())}"
        )
    described = [form for form in asked if TASKS[form] == "captions"]
    layers = draft_layers(target)
    place = work / target.fingerprint.removeprefix("sha256:")[:12]
    answers = open_answers(model, "auto", device, None, LONGEST, None, None, print)

    def told(form: str, part: str, count: int, offset: int = 0) -> RecordSet:
        folder = place / f"{part}-{form}"
        data = f"{form}:{part}:{count}" + (f":offset={offset}" if offset else "")
        generate_data(answers, load_records(data), folder, GenerationOptions(LONGEST))
        return replace(load_records(str(folder)), name=data)

    train = {
        form: told(form, "train", captions if form in described else min(QUESTIONS, captions), TOLD)
        for form in asked
    }
    chosen = [told(form, "validation", min(VALIDATION, captions)) for form in described]
    held = {form: told(form, "heldout", heldout) for form in asked}
    together, validation = joined(list(train.values())), joined(chosen)
    # Names of folders are no part of the identity, only keys, prompts, pictures and tokens are.
    features = cached_features(target, together, validation, held[captioned], layers, work / "features")
    return Workshop(
        target,
        features,
        together.identity() + validation.identity(),
        batch,
        answers=Answers(together, train[captioned], validation, held[captioned], held),
    )


def joined(sets: Sequence[RecordSet]) -> RecordSet:
    """The answers of one target, one after the other."""
    name, records = " + ".join(one.name for one in sets), [record for one in sets for record in one]
    return RecordSet(name, records, [], sets[0].generated_by)


def make_imitation(workshop: Workshop, work: Path, out: Path, steps: int = STEPS) -> list[Path]:
    """Trains a network for every layer that was prepared, and writes it to ``out/nN``; gives these folders."""
    made = []
    for layer in workshop.features:
        run = work / "runs" / run_name(f"n{layer}", workshop.target)
        draft = workshop.train(ImitationOptions(layer), LoopOptions(steps, workshop.batch), run)
        made.append(_store(draft, out / f"n{layer}"))
    return made


def make_heads(workshop: Workshop, work: Path, out: Path, steps: int = HEAD_STEPS) -> list[Path]:
    """Trains Medusa heads, and writes them to ``out/medusa``."""
    run = work / "runs" / run_name("medusa", workshop.target)
    return [_store(workshop.train(HEADS, LoopOptions(steps, workshop.batch), run), out / "medusa")]


def make_layers(
    workshop: Workshop, work: Path, out: Path, steps: int = LAYER_STEPS, batch: int = LAYER_BATCH
) -> list[Path]:
    """Trains a layer of EAGLE and one of ViSpec, this one in its two stages of half the steps each, for a decoder that
    reads pictures among its embeddings (none for another), and writes them to ``out/eagle`` and ``out/vispec``."""
    target = workshop.target
    try:
        check_family(target.family)
    except ExportError:
        return []
    made = []
    answers = whole_answers(workshop)
    texts = answers.train, answers.validation
    for kind in LAYERS:
        run = work / "runs" / run_name(kind, target)
        loop = LoopOptions(steps, batch)
        train_in_stages(options_of(kind).of({}), loop, target, texts, run, work / "features")
        draft = open_draft(run)
        assert isinstance(draft, TrainedDraft)
        made.append(_store(draft, out / kind))
    return made


def _store(draft: TrainedDraft, folder: Path) -> Path:
    """Writes the draft in fp16."""
    shutil.rmtree(folder, ignore_errors=True)
    draft.save(folder, torch.float16)
    return folder


def measure(workshop: Workshop, folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Measures drafts as they are stored on all that is held out, and writes what it finds into their ``draft.json``: the
    figures over everything and, where there are several, those of each form; beside those of an imitation network alpha of
    the bare exit. Returns it, by folder."""
    drafts = [open_draft(folder) for folder in folders]
    bare = {d.layer: f"early-exit@{d.layer}" for d in drafts if isinstance(d, ImitationDraft)}
    names = [*map(str, folders), *bare.values()]
    held = whole_answers(workshop).forms
    by_form: dict[str, dict[str, Acceptance]] = {
        form: evaluate_drafts(workshop.target, records, names, DRAFT_LENGTH, report=print)
        for form, records in held.items()
    }

    def of(name: str) -> dict[str, Any]:
        parts = {form: by_draft[name] for form, by_draft in by_form.items()}
        each = {form: figures([result]) for form, result in parts.items()}
        return figures(list(parts.values())) | ({"parts": each} if len(each) > 1 else {})

    told = {}
    for folder, draft in zip(folders, drafts, strict=True):
        assert isinstance(draft, TrainedDraft)
        told[folder.name] = {"data": joined(list(held.values())).name, **of(str(folder))}
        if isinstance(draft, ImitationDraft):
            told[folder.name]["early_exit"] = of(bare[draft.layer])
        evaluation = draft.evaluation | {"heldout": told[folder.name]}
        replace(draft, evaluation=evaluation).save(folder, torch.float16)
    return told


def figures(parts: Sequence[Acceptance]) -> dict[str, Any]:
    """What a draft reaches over several sets of answers."""
    tokens = sum(part.tokens for part in parts)
    total = Stats(
        accepted=sum(part.accepted for part in parts),
        evaluated=sum(part.evaluated for part in parts),
        cycles=sum(part.cycles for part in parts),
    )
    return {
        "draft_length": parts[0].draft_length,
        "alpha": round(total.alpha or 0.0, 5),
        "tau": round(total.tau, 4),
        "overlap": round(sum(part.overlap * part.tokens for part in parts) / max(1, tokens), 5),
        "tokens": tokens,
    }


def run_name(draft: str, target: Target) -> str:
    """Folder of a draft's training below the runs."""
    return f"shipped-{draft}-{target.fingerprint[7:19]}"


def draft_layers(target: Target) -> tuple[int, int]:
    """A quarter and a half of the decoder."""
    return target.num_layers // 4, target.num_layers // 2


def main() -> None:
    """Command line of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a bundled model, or a folder that a recipe made")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--captions", type=int, default=CAPTIONS, help="training scenes")
    parser.add_argument("--heldout", type=int, default=HELDOUT)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: all that suit the model"
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=list(FORMS),
        help="what drafts learn and are measured on, as --data calls it; default: all that the model answers",
    )
    parser.add_argument("--batch-size", type=int, default=BATCH, help="records a step, of networks and heads")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--head-steps", type=int, default=HEAD_STEPS)
    parser.add_argument("--layer-steps", type=int, default=LAYER_STEPS)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--device", default="auto", help="auto: a GPU where PyTorch finds one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workshop = prepare(
        options.model, options.work, options.captions, options.heldout, options.device, options.batch_size,
        options.forms or captioner_of(open_checkpoint(options.model).architecture).forms(),
    )  # fmt: skip
    made: list[Path] = []
    for kind, make, steps in (
        ("imitation", make_imitation, options.steps),
        ("medusa", make_heads, options.head_steps),
        ("layers", make_layers, options.layer_steps),
    ):
        if kind in options.kinds:
            made += make(workshop, options.work, options.out, steps)
    for name, told in measure(workshop, made).items():
        print(
            f"{name}: alpha {told['alpha']:.4f}, tau {told['tau']:.3f} at d={told['draft_length']}, "
            f"Σmin(p,q) {told['overlap']:.4f} on {told['tokens']} held-out tokens"
        )


if __name__ == "__main__":
    main()
