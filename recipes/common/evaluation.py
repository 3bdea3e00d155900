"""The figures of a finished model, and whether they are what a bundled model must reach."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from vlmexport.calibration.data.scenes import measure_floor, score_told, tell
from vlmexport.calibration.data.scenes.scene import HELDOUT, TRAIN, VALIDATION, Scene, sample_scene
from vlmexport.calibration.data.scenes.score import total_accuracy
from vlmexport.calibration.data.scenes.text_stats import NgramModel, prompt_lookup_tau
from vlmexport.exporter.drafts.common.base import SelfDraft
from vlmexport.runtime.common.cpu_count import cores
from vlmexport.runtime.hardware.machine import processor

from .captioner import Captioner
from .checks import Checks, by_type, share
from .drafts import exits, measure_drafts

GREY = 200  # scenes with a grey picture


def musts(captioner: Captioner) -> dict[str, tuple[float, float]]:
    """Least and most that the figures of a bundled model may be."""
    return {
        "facts": (0.80, 1.0),
        "facts_scenes_with_unseen": (0.60, 1.0),
        **({"answers": (0.85, 1.0)} if captioner.asks else {}),
        "wrong_picture": (0.0, 0.10),
        "grey_picture": (0.0, 0.10),
        "perplexity_over_floor": (0.0, 1.15),
        f"early_exit_{captioner.early[0]}_alpha": captioner.early_range,
        "five_gram_perplexity": (3.0, float("inf")),
        "prompt_lookup_tau": (0.0, 1.2),
        **captioner.further_musts(),
    }


def evaluate(
    captioner: Captioner,
    folder: Path,
    scenes: int = 1000,
    seed: int = 0,
    known: int = 8000,
    drafts: Mapping[str, SelfDraft] | None = None,
) -> dict[str, Any]:
    """All figures of a model on the first `scenes` held-out scenes, greedy, and of drafts on its captions of them.

    Args:
        folder: where `captioner` was opened; its fp16 weights are computed with as fp32.
        known: training captions that the 5-gram model is estimated on.
        drafts: beside the bare exits, by name; such as look at each row by itself.
    """
    clock = time.time()
    checks = Checks(captioner, seed, HELDOUT[:scenes])
    texts, ids = checks.captions()
    grey = Checks(captioner, seed, HELDOUT[: min(scenes, GREY)], grey=True)
    replies = checks.answers() if captioner.asks else {}
    bare = exits(captioner)
    measured = {**bare, **(drafts or {})}
    own = measure_drafts(captioner, checks.image_embeds, checks.prompt, ids, measured)
    usual = Checks(captioner, seed, VALIDATION[:scenes])
    surprise = usual.surprise()
    floor = measure_floor(usual.scenes, lambda text: len(captioner.text_ids([text])[0]))
    alone = text_alone(captioner, seed, scenes, known, checks.prompt)
    further = captioner.further(seed, HELDOUT[:scenes])
    result: dict[str, Any] = {
        "facts": facts(texts, checks.scenes),
        "plans": round(checks.plans(texts), 4),
        **({"answers": round(share(replies), 4), "answers_by_type": by_type(replies)} if replies else {}),
        "wrong_picture": round(total_accuracy(map(score_told, texts, checks.others())), 4),
        "grey_picture": round(total_accuracy(map(score_told, grey.captions()[0], grey.scenes)), 4),
        "perplexity": {name: round(value, 4) for name, value in surprise.items()},
        "generator": {"nats_per_token": round(floor.nats, 4), "standard_error": round(floor.error, 4)},
        "own_captions": {
            "tokens": round(float(np.mean([len(row) for row in ids])), 2),
            "cut": sum(row[-1] != captioner.end for row in ids),
            "entropy": asdict(own.entropy),
            "below_half": own.below_half,
            "share": {"by_part": own.share_by_part, "by_span": own.share_by_span},
        },
        "drafts": {
            name: {"layer": draft.layer, "fingerprint": draft.fingerprint, **own.drafts[name].to_dict()}
            for name, draft in measured.items()
        },
        "text_alone": alone,
        **further,
    }
    values = {
        "facts": result["facts"]["all"],
        "facts_scenes_with_unseen": result["facts"].get("scenes_with_unseen"),
        **({"answers": result["answers"]} if replies else {}),
        "wrong_picture": result["wrong_picture"],
        "grey_picture": result["grey_picture"],
        "perplexity_over_floor": surprise["over_floor"],
        f"early_exit_{captioner.early[0]}_alpha": own.drafts[next(iter(bare))].acceptance.alpha,
        **{name: alone[name] for name in ("five_gram_perplexity", "prompt_lookup_tau")},
        **{name: further[name] for name in captioner.further_musts()},
    }
    return {
        "model": folder.name,
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "scenes": scenes,
        "seed": seed,
        "musts": judged(values, musts(captioner)),
        **result,
        "parameters": sum(p.numel() for p in captioner.model.parameters()),
        "bytes": {f.name: f.stat().st_size for f in sorted(folder.iterdir()) if f.is_file()},
        "seconds": round(time.time() - clock, 1),
        "machine": machine(),
    }


def machine() -> dict[str, object]:
    """The processor and the versions that the figures belong to."""
    versions = {package: version(package) for package in ("torch", "transformers", "numpy", "pillow")}
    return {"cpu": processor(), "cores": cores(), "python": platform.python_version(), **versions}


def judged(
    values: dict[str, float | None], limits: dict[str, tuple[float, float]]
) -> dict[str, dict[str, Any]]:
    """Every must with its value, its limits, and whether the value lies within them (a missing value does not)."""
    return {
        name: {
            "value": None if values[name] is None else round(values[name], 4),  # type: ignore[arg-type]
            "least": low,
            "most": high if high != float("inf") else None,
            "met": values[name] is not None and low <= values[name] <= high,  # type: ignore[operator]
        }
        for name, (low, high) in limits.items()
    }


def facts(texts: Sequence[str], scenes: Sequence[Scene]) -> dict[str, float]:
    """Accuracy over the headline facts (object, colour, relation), by type, and by whether a pair is unseen."""
    scores = [score_told(text, scene) for text, scene in zip(texts, scenes, strict=True)]
    result = {"all": total_accuracy(scores)}
    for name in ("object", "colour", "relation", "size", "pattern", "setting"):
        result[name] = total_accuracy(scores, name)
    new = [s for s, scene in zip(scores, scenes, strict=True) if scene.unseen]
    if new:
        result["scenes_with_unseen"] = total_accuracy(new)
        result["scenes_without_unseen"] = total_accuracy(
            [s for s, scene in zip(scores, scenes, strict=True) if not scene.unseen]
        )
        result["unseen_objects"] = total_accuracy(new, "unseen")
    return {name: round(value, 4) for name, value in result.items()}


def text_alone(
    captioner: Captioner, seed: int, scenes: int, known: int, prompt: list[int]
) -> dict[str, float]:
    """What the words tell without a picture: a 5-gram model, prompt lookup, and the lengths."""
    train = captioner.text_ids([tell(sample_scene(seed, i), 1).text for i in TRAIN[:known]])
    other = captioner.text_ids([tell(sample_scene(seed, i)).text for i in VALIDATION[:scenes]])
    lengths = [len(text) for text in other]
    cycles = sum(len(text) / prompt_lookup_tau(prompt, text) for text in other)
    return {
        "five_gram_perplexity": round(NgramModel(train).perplexity(other), 4),
        "prompt_lookup_tau": round(sum(lengths) / cycles, 4),
        "tokens_least": min(lengths),
        "tokens_mean": round(float(np.mean(lengths)), 2),
        "tokens_most": max(lengths),
    }


def report(result: dict[str, Any], path: Path | None) -> None:
    """Prints the figures, then which musts are met; also writes the figures to `path`."""
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    for name, must in result["musts"].items():
        print(
            f"{'met' if must['met'] else 'NOT MET'}: {name} {must['value']} (least {must['least']}, most {must['most']})"
        )
    if path is not None:
        path.write_text(text)
