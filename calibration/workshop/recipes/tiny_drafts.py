"""Makes the drafts that ship with a bundled model: imitation networks at a quarter and at half of its decoder's layers,
and Medusa heads.

    python -m vlmexport.calibration.workshop.recipes.tiny_drafts --model tiny-blip2-flant5 --work WORK --out DRAFTS

WORK receives the target's own answers, the cached rows and the runs; everything in it is reused, so an
interrupted recipe continues. DRAFTS receives a folder a draft, ``n3`` and ``medusa`` (fp16). A model that takes no prompt
learns from captions only. ``benchmarks/papers_fastvlm_table1.py`` uses the same WORK.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ....exporter.drafts.imitation import ImitationDraft
from ....exporter.drafts.medusa import MedusaDraft
from ....exporter.drafts.trained import TrainedDraft
from ....runtime.measure.machine import cores
from ...data import RecordSet, load_records
from ...evaluation.acceptance import Acceptance
from ...generation.answers import GenerationOptions
from ...generation.engine import open_answers
from ...generation.generate import generate_data
from ...targets.target import Target, load_target
from ...training.features import CachedFeatures, build_cache
from ...training.objectives.imitation_options import ImitationOptions
from ...training.objectives.medusa_options import MedusaOptions
from ...training.options import LoopOptions
from .common.captioner import LONGEST
from .models import captioner_of
from .workshop import SHIPPED, Features, Workshop

MODEL = "tiny-blip2-flant5"
CAPTIONS, QUESTIONS, VALIDATION, HELDOUT = 4096, 2048, 256, 1000
STEPS = 1500
HEADS = MedusaOptions(heads=4, head="own")
HEAD_STEPS = 3000
TOLD = 64_000  # scenes of `train` that the target has learned from; drafts take later ones


def prepare(model: str, work: Path, captions: int = CAPTIONS, heldout: int = HELDOUT) -> Workshop:
    """Lets the target answer training, validation and held-out scenes, and caches its rows."""
    target = load_target(model)
    kind = captioner_of(target.checkpoint.architecture)
    # A captioner continues its prompt: "describe the scene" would be the beginning of a caption.
    captioned = "scenes-captions" if kind.prompt is None else "scenes"
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
    answers = open_answers(model, "auto", "auto", None, LONGEST, None, None, print)
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
    features = {n: Features(**{k: CachedFeatures(v, n) for k, v in stores.items()}) for n in layers}
    return Workshop(
        target, features, train.identity() + told["validation"].identity(), heldout_data=sets["heldout"]
    )


def make_drafts(
    workshop: Workshop, work: Path, out: Path, steps: int = STEPS, head_steps: int = HEAD_STEPS
) -> dict[str, Acceptance]:
    """Trains a draft for every layer that was prepared, and heads, measures each as stored, and writes them to
    ``out/nN`` and ``out/medusa``; returns what was measured, by folder."""
    found = {}
    target = workshop.target.fingerprint[7:19]
    for layer in workshop.features:
        kind = ImitationOptions(layer, **SHIPPED)  # type: ignore[arg-type]
        run = work / "runs" / f"shipped-n{layer}-{target}"
        draft = workshop.train(kind, LoopOptions(steps, lr=workshop.lr), run)
        assert isinstance(draft, ImitationDraft)
        found[f"n{layer}"] = _store(
            draft, out / f"n{layer}", workshop, lambda d, n=layer: workshop.heldout(n, d.network)
        )
    heads = workshop.train(HEADS, LoopOptions(head_steps), work / "runs" / f"shipped-medusa-{target}")
    assert isinstance(heads, MedusaDraft)
    found["medusa"] = _store(heads, out / "medusa", workshop, workshop.heldout_heads)
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
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--head-steps", type=int, default=HEAD_STEPS)
    parser.add_argument("--threads", type=int, default=cores())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    workshop = prepare(options.model, options.work, options.captions, options.heldout)
    for name, result in make_drafts(
        workshop, options.work, options.out, options.steps, options.head_steps
    ).items():
        print(
            f"{name}: alpha {result.alpha:.4f}, tau {result.tau:.3f} at d={result.draft_length}, "
            f"Σmin(p,q) {result.overlap:.4f} on {result.tokens} held-out tokens"
        )


if __name__ == "__main__":
    main()
