"""What heads and captions of `papers_medusa_captioning.py` are worth, in no time at all: only tokens are counted.

Every held-out scene is decoded plainly and with the heads, by the runtime, on the bundle of the heads' own target.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.scenes.reading import check_told_plan
from vlmexport.calibration.data.scenes.scene import HELDOUT, VALIDATION, sample_scene
from vlmexport.calibration.evaluation.run import evaluate_drafts
from vlmexport.calibration.features.features import LiveFeatures
from vlmexport.calibration.objectives.medusa import measure_hits
from vlmexport.calibration.targets.target import load_target
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.drafts.folders import open_draft
from vlmexport.exporter.drafts.medusa.medusa import MedusaDraft
from vlmexport.runtime import Session
from vlmexport.runtime.session.result import Result
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.captioning_runs import Run, bundle, model_of
from recipes.common.captioner import LONGEST
from recipes.common.checks import Checks
from recipes.common.evaluation import facts
from recipes.models import open_captioner

UNSEEN = 100_000
"""Validation scenes from here on choose rates; the first ones choose the best step of a training, the last ones are read."""


def quality(run: Run, folder: Path, scenes: int) -> dict[str, Any]:
    """Of a finished training on the first `scenes` held-out scenes: what chains of its heads reach, which ranks are
    right, how many requests differ from plain decoding of the same bundle, and the captions of its target.

    `tau` is in tokens per step of the target, the bonus included; `hits[k][r]` is the share of right tokens of rank r of
    head k + 1, given that the tokens before were among the proposals; `tokens` are those of the plain captions.
    """
    records = load_records(f"scenes-captions:heldout:{scenes}")
    plain, total, different = decoded(bundle(run, folder), records, "medusa", run.heads)
    draft = open_draft(folder / "trained" / run.name)
    assert isinstance(draft, MedusaDraft)
    target = load_target(model_of(run, folder), "cpu")
    told = RecordSet(
        "told", [replace(r, tokens=tuple(p.tokens)) for r, p in zip(records, plain, strict=True)]
    )
    return {
        **run.described(),
        "seed": run.seed,
        "target": target.fingerprint,
        "best_step": draft.evaluation["step"],
        "tau": round(total.tau, 4),
        "alpha": round(total.alpha or 0.0, 5),
        "alpha_by_depth": [round(alpha or 0.0, 5) for alpha in total.alpha_by_depth],
        "hits": measure_hits(draft.network, LiveFeatures(target, told, target.num_layers), target),
        "different": different,
        "tokens": sum(len(result.tokens) for result in plain),
        "captions": captions(model_of(run, folder), plain),
        "texts": [result.text for result in plain],
    }


def decoded(bundle: Path, records: RecordSet, draft: str, length: int) -> tuple[list[Result], Stats, int]:
    """Captions of the records' pictures: decoded plainly, then the counters of chains of `length` of a draft of the bundle, and
    in how many captions those differ."""
    plain, drafted = [], []
    with Session.load(bundle) as session:
        for record in records:
            assert record.image is not None, "scenes have pictures"
            asked = {"image": record.image.load(), "max_new_tokens": LONGEST}
            plain.append(session.generate(**asked, draft="none"))
            drafted.append(session.generate(**asked, draft=draft, draft_length=length))
    different = sum(a.tokens != b.tokens for a, b in zip(plain, drafted, strict=True))
    return plain, Stats.total(result.stats for result in drafted), different


def worth(runs: Sequence[dict[str, Any]], frozen: Sequence[str] | None) -> dict[str, Any]:
    """Of the captions of several seeds, each with `different`, `texts` and `captions`: how many differ from plain decoding, the
    means of what they are worth, and the share that equals those of the frozen target word by word, None without those."""
    same = [a == b for run in runs for a, b in zip(run["texts"], frozen or run["texts"], strict=True)]
    return {
        "different": sum(run["different"] for run in runs),
        "captioned": len(same),
        "captions": {
            name: round(statistics.mean(run["captions"][name] for run in runs), 4)
            for name in runs[0]["captions"]
        },
        "same_captions": None if frozen is None else round(statistics.mean(same), 4),
    }


WORTH = "differ from plain decoding | facts | plans | tokens a caption | perplexity over floor | captions as before"
"""Heads of the columns of `worth_cells`."""


def worth_cells(row: dict[str, Any]) -> str:
    """What `worth` found, as cells of Markdown."""
    told = row["captions"]
    same = "" if row["same_captions"] is None else f"{row['same_captions']:.1%}"
    return (
        f"{row['different']} of {row['captioned']:,} | {told['facts']:.1%} | {told['plans']:.1%} | {told['tokens']:.1f} "
        f"| {told['perplexity_over_floor']:.3f} | {same}"
    )


def captions(model: str, told: Sequence[Result]) -> dict[str, float]:
    """Of a target's captions of the first held-out scenes, in their order: share of right facts, of plans that are
    complete and true, tokens; and its perplexity per token of the references of as many scenes, over that of the
    generator that drew them."""
    texts, scenes = [result.text for result in told], [sample_scene(0, i) for i in HELDOUT[: len(told)]]
    plans = [check_told_plan(text, scene).right for text, scene in zip(texts, scenes, strict=True)]
    return {
        "facts": facts(texts, scenes)["all"],
        "plans": round(statistics.mean(plans), 4),
        "tokens": round(statistics.mean(len(result.tokens) for result in told), 2),
        "perplexity_over_floor": over_floor(model, len(told)),
    }


def over_floor(model: str, scenes: int) -> float:
    """Perplexity per token of the references of so many validation scenes, over that of the generator that drew them."""
    references = Checks(open_captioner(open_checkpoint(model).folder), 0, VALIDATION[-scenes:])
    return round(references.surprise()["over_floor"], 4)


def of_rates(run: Run, folder: Path, scenes: int) -> dict[str, Any]:
    """Of a finished training, on validation scenes that did not choose its best step: alpha and tau of chains of its heads on
    its own target's captions, counted in one pass over them, and that target's perplexity over the floor."""
    model, trained = model_of(run, folder), str(folder / "trained" / run.name)
    records = load_records(f"scenes-captions:validation:{scenes}:offset={UNSEEN}")
    (acceptance,) = evaluate_drafts(
        load_target(model, "cpu"), records, [trained], run.heads, LONGEST
    ).values()
    return {
        **run.described(),
        "alpha": round(acceptance.alpha, 4),
        "tau": round(acceptance.tau, 3),
        "tokens": acceptance.tokens,
        "perplexity_over_floor": over_floor(model, scenes),
    }
