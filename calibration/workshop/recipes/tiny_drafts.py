"""Makes the drafts that ship with a bundled model: imitation networks at a quarter and at half of its decoder's layers,
Medusa heads, and layers of EAGLE and of ViSpec for a decoder that reads pictures among its rows.

    python -m vlmexport.calibration.workshop.recipes.tiny_drafts --model tiny-blip2-flant5 --work WORK --out DRAFTS

WORK receives the target's own answers, the cached rows and the runs; everything in it is reused, so an
interrupted recipe continues. DRAFTS receives a folder a draft, ``n3``, ``medusa``, ``vispec`` (fp16). A model that takes no prompt
learns from captions only. ``benchmarks/papers_fastvlm_table1.py`` uses the same WORK. For a model with a vocabulary of real texts, in which
heads and rows of logits are large, ``--kinds imitation --batch-size 8`` makes the networks alone.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ....exporter.drafts import open_draft
from ....exporter.drafts.trained import TrainedDraft
from ....exporter.drafts.vispec import check_family
from ....runtime.errors import ExportError
from ....runtime.measure.machine import cores
from ...data import RecordSet, load_records
from ...evaluation.acceptance import Acceptance
from ...evaluation.run import evaluate_drafts
from ...generation.answers import GenerationOptions
from ...generation.engine import open_answers
from ...generation.generate import generate_data
from ...targets.target import Target, load_target
from ...training.features import CachedFeatures, build_cache
from ...training.objectives import options_of
from ...training.objectives.imitation_options import ImitationOptions
from ...training.objectives.medusa_options import MedusaOptions
from ...training.options import LoopOptions
from .common.captioner import LONGEST
from .layer_stages import LAYERS, train_in_stages, whole_answers
from .models import captioner_of
from .workshop import DRAFT_LENGTH, Answers, Features, Workshop

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
) -> Workshop:
    """Lets the target answer training, validation and held-out scenes, and caches its rows."""
    target = load_target(model, device)
    kind = captioner_of(target.checkpoint.architecture)
    captioned = kind.captions_form()
    layers = draft_layers(target)
    place = work / target.fingerprint.removeprefix("sha256:")[:12]
    sets = {
        "captions": f"{captioned}:train:{captions}:offset={TOLD}",
        "questions": f"scenes-questions:train:{min(QUESTIONS, captions)}:offset={TOLD}",
        "validation": f"{captioned}:validation:{min(VALIDATION, captions)}",
        "heldout": f"{captioned}:heldout:{heldout}",
    }
    if not kind.asks:
        del sets["questions"]
    told = {}
    answers = open_answers(model, "auto", device, None, LONGEST, None, None, print)
    for name, data in sets.items():
        generate_data(answers, load_records(data), place / name, GenerationOptions(LONGEST))
        told[name] = load_records(str(place / name))
    learned = [name for name in ("captions", "questions") if name in told]
    train = RecordSet(
        "+".join(learned), [r for name in learned for r in told[name]], [], told["captions"].generated_by
    )
    # Names of folders are no part of the identity, only keys, prompts, pictures and tokens are.
    stores = {
        name: build_cache(target, records, layers, work / "features", dtype)
        for name, records, dtype in (
            ("train", train, "float16"),
            ("validation", told["validation"], "float16"),
            ("heldout", told["heldout"], "float32"),
        )
    }
    features = {
        n: Features(**{k: CachedFeatures(v, n, target.device) for k, v in stores.items()}) for n in layers
    }
    return Workshop(
        target,
        features,
        train.identity() + told["validation"].identity(),
        batch,
        heldout_data=sets["heldout"],
        answers=Answers(train, told["captions"], told["validation"], told["heldout"]),
    )


def make_imitation(workshop: Workshop, work: Path, out: Path, steps: int = STEPS) -> dict[str, Acceptance]:
    """Trains a network for every layer that was prepared, measures each as stored, and writes it to ``out/nN``; returns what
    was measured, by folder."""
    found = {}
    for layer in workshop.features:
        run = work / "runs" / run_name(f"n{layer}", workshop.target)
        draft = workshop.train(ImitationOptions(layer), LoopOptions(steps, workshop.batch), run)
        found[f"n{layer}"] = _store(
            draft, out / f"n{layer}", workshop, lambda d, n=layer: workshop.heldout(n, d.network)
        )
    return found


def make_heads(workshop: Workshop, work: Path, out: Path, steps: int = HEAD_STEPS) -> dict[str, Acceptance]:
    """Trains Medusa heads, measures them as stored, and writes them to ``out/medusa``."""
    run = work / "runs" / run_name("medusa", workshop.target)
    heads = workshop.train(HEADS, LoopOptions(steps, workshop.batch), run)
    return {"medusa": _store(heads, out / "medusa", workshop, workshop.heldout_heads)}


def make_layers(
    workshop: Workshop, work: Path, out: Path, steps: int = LAYER_STEPS, batch: int = LAYER_BATCH
) -> dict[str, Acceptance]:
    """Trains a layer of EAGLE and one of ViSpec, this one in its two stages of half the steps each, for a decoder that
    reads pictures among its rows (none for another), measures each as stored, and writes them to ``out/eagle`` and
    ``out/vispec``."""
    target = workshop.target
    try:
        check_family(target.family)
    except ExportError:
        return {}

    def measured(name: str) -> Callable[[TrainedDraft], Acceptance]:
        def measure(_: TrainedDraft) -> Acceptance:
            folder = str(out / name)
            (found,) = evaluate_drafts(target, answers.heldout, [folder], DRAFT_LENGTH, report=print).values()
            return found

        return measure

    found = {}
    answers = whole_answers(workshop)
    texts = answers.train, answers.validation
    for kind in LAYERS:
        run = work / "runs" / run_name(kind, target)
        loop = LoopOptions(steps, batch)
        train_in_stages(options_of(kind).of({}), loop, target, texts, run, work / "features")
        draft = open_draft(run)
        assert isinstance(draft, TrainedDraft)
        found[kind] = _store(draft, out / kind, workshop, measured(kind))
    return found


D = TypeVar("D", bound=TrainedDraft)


def _store(draft: D, folder: Path, workshop: Workshop, measure: Callable[[D], Acceptance]) -> Acceptance:
    """Writes the draft in fp16 with what `measure` finds of it as it is stored."""
    shutil.rmtree(folder, ignore_errors=True)
    draft.save(folder, torch.float16)
    stored = type(draft).load(folder)
    result = measure(stored)
    short = {
        "data": workshop.heldout_data,
        "draft_length": result.draft_length,
        "alpha": round(result.alpha, 5),
        "tau": round(result.tau, 4),
        "overlap": round(result.overlap, 5),
        "tokens": result.tokens,
    }
    replace(stored, evaluation=draft.evaluation | {"heldout": short}).save(folder, torch.float16)
    return result


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
    parser.add_argument("--batch-size", type=int, default=BATCH, help="records a step, of networks and heads")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--head-steps", type=int, default=HEAD_STEPS)
    parser.add_argument("--layer-steps", type=int, default=LAYER_STEPS)
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--device", default="auto", help="auto: a GPU where PyTorch finds one")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workshop = prepare(
        options.model, options.work, options.captions, options.heldout, options.device, options.batch_size
    )
    found = {}
    for kind, make, steps in (
        ("imitation", make_imitation, options.steps),
        ("medusa", make_heads, options.head_steps),
        ("layers", make_layers, options.layer_steps),
    ):
        if kind in options.kinds:
            found |= make(workshop, options.work, options.out, steps)
    for name, result in found.items():
        print(
            f"{name}: alpha {result.alpha:.4f}, tau {result.tau:.3f} at d={result.draft_length}, "
            f"Σmin(p,q) {result.overlap:.4f} on {result.tokens} held-out tokens"
        )


if __name__ == "__main__":
    main()
