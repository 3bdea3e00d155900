"""Draft & Verify beside early exit and imitation drafts on one frozen target, by counts alone.

    python -m benchmarks.papers_draft_and_verify --model tiny-blip2-flant5
    python -m benchmarks.papers_draft_and_verify --model tiny-vit-gpt2
    python -m benchmarks.papers_draft_and_verify --model tiny-qwen2.5-vl

Searches sublayers to leave out on some of the target's own answers, once freely and once for each layer n of the shipped
imitation drafts, with no more weights than an exit after n layers reads; measures what was found on other answers. Every
draft has the fixed chain length that is best for it there, and the free search the paper's threshold, too. What a speed-up
by weights is: tokens per cycle over 1 + share x drafted, the share of the target's weights that a drafted token reads,
its head included. No clock. Writes results/papers-draft-and-verify-MODEL.json. --drafts measures the shipped drafts anew and keeps
the searches that stand there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import load_records
from vlmexport.calibration.evaluation.run import answered, evaluate_drafts
from vlmexport.calibration.evaluation.skipped import chains, replay
from vlmexport.calibration.search.draft_and_verify import Answers, SearchOptions, best_set, starts
from vlmexport.calibration.targets.target import load_target
from vlmexport.exporter.drafts.folders import shipped_drafts
from vlmexport.exporter.drafts.imitation.imitation import ImitationDraft
from vlmexport.exporter.families.common.layer_skip import Sublayers
from vlmexport.runtime.policy.base import FixedLength
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.machine import RESULTS, save
from recipes.models import captioner_of
from recipes.tiny_drafts import TOLD

LONGEST = 8


@dataclass
class Row:
    """One draft at one way of ending chains."""

    draft: str
    length: int | str
    share: float
    alpha: float
    tau: float
    drafted: float
    """A cycle."""
    skip: Sublayers | None = None
    seed: int | None = None

    @property
    def speedup(self) -> float:
        return self.tau / (1 + self.share * self.drafted)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "speedup_by_weights": round(self.speedup, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-blip2-flant5")
    parser.add_argument("--searched", type=int, default=8, help="answers that choose")
    parser.add_argument("--heldout", type=int, default=24, help="answers that measure")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--trials", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0, help="of the first search")
    parser.add_argument("--seeds", type=int, default=1, help="searches, each with its own seed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--drafts", action="store_true", help="the shipped drafts alone, beside searches of before"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target = load_target(options.model)
    kind = captioner_of(target.checkpoint.architecture).captions_form()
    sets = [
        answered(target, load_records(data), options.max_new_tokens, print)
        for data in (f"{kind}:train:{options.searched}:offset={TOLD}", f"{kind}:heldout:{options.heldout}")
    ]
    told, held = (Answers(target, records) for records in sets)
    layers, weights = target.num_layers, told.weights
    rows: list[Row] = []
    alias = target.checkpoint.alias
    assert alias is not None, "a bundled model"
    shipped = [draft for draft in shipped_drafts(alias) if isinstance(draft, ImitationDraft)]
    limits: list[tuple[str, float]] = [("free", 1.0)]
    for draft in sorted(shipped, key=lambda draft: draft.layer):
        share = weights.first_layers(draft.layer)
        folder = next(f for f in alias.draft_folders() if f.name == f"n{draft.layer}")
        limits.append((f"as n = {draft.layer}", share))
        for name, own in (
            (f"early-exit@{draft.layer}", share),
            (str(folder), weights.exit_with(draft.layer, draft.network)),
        ):
            rows.append(best(name, folder, own, target, sets[1]))
            print(line(rows[-1]), flush=True)
    result = {
        "script": "benchmarks/papers_draft_and_verify.py",
        "model": {"name": target.name, "fingerprint": target.fingerprint, "layers": layers},
        "weights": asdict(weights),
        "answers": {"searched": len(told.texts), "heldout": len(held.texts)},
        "tokens": {"searched": count(told), "heldout": count(held)},
        "trials": options.trials,
        "seed": options.seed,
        "seeds": options.seeds,
    }
    stored = f"papers-draft-and-verify-{target.name}"
    if options.drafts:
        rows += kept(RESULTS / f"{stored}.json", result)
        limits = []
    for name, limit in limits:
        for seed in range(options.seed, options.seed + options.seeds):
            for row in searched(
                target, told, held, name, limit, SearchOptions(options.trials, seed, LONGEST)
            ):
                rows.append(row)
                print(line(row), flush=True)
    print(
        "| draft | chains | left out | reads | alpha | tau | drafted a cycle | by weights |\n|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(line(row))
    print("\n".join(spreads(rows)))
    result["rows"] = [row.to_dict() for row in rows]
    print(save(stored, result, "torch", "transformers", "optuna"))


def kept(path: Path, result: Mapping[str, Any]) -> list[Row]:
    """What was searched before, on the same model and answers; SystemExit for a result of others."""
    document = json.loads(path.read_text("utf-8"))
    for name, value in json.loads(json.dumps(result)).items():
        if (before := document.get(name, 1)) != value:
            raise SystemExit(f"{path} has {name} = {before}, this run {value}: search anew, without --drafts")
    rows = []
    for row in document["rows"]:
        if row["skip"] is not None:
            del row["speedup_by_weights"]
            rows.append(Row(**{"seed": document["seed"]} | row | {"skip": Sublayers.of(**row["skip"])}))
    return rows


def searched(
    target: Any, told: Answers, held: Answers, name: str, limit: float, search: SearchOptions
) -> Iterator[Row]:
    """What a search finds within `limit` of the target's weights: chains of the best fixed length, and the paper's threshold."""
    weights = told.weights

    def worth(skip: Sublayers) -> float:
        over = weights.share(skip) - limit
        return -over if over > 1e-9 else told.measure(skip, search).speedup

    layers = target.num_layers
    sublayers = best_set(worth, layers, search.trials, search.seed, starts(layers), print)
    share, eos = weights.share(sublayers), target.eos_token_ids
    drafted = [chains(target, text, sublayers, LONGEST) for text in held.texts]

    def row(length: int | str, policies: Callable[[], Any]) -> Row:
        stats = [replay(each, policies(), eos) for each in drafted]
        return replace(of(f"draft-and-verify, {name}", length, share, sublayers, stats), seed=search.seed)

    fixed = [row(length, partial(FixedLength, length)) for length in range(1, LONGEST + 1)]
    yield max(fixed, key=lambda each: each.speedup)
    yield row("threshold", search.policy)


def spreads(rows: Sequence[Row]) -> Iterator[str]:
    """Of what was searched with several seeds: the least and the most, by how chains end."""
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        if row.seed is not None:
            groups.setdefault((row.draft, row.length == "threshold"), []).append(row)
    for (name, threshold), group in groups.items():
        by = {key: [getattr(row, key) for row in group] for key in ("alpha", "share", "speedup")}
        shown = ", ".join(f"{key} {min(values):.3f} – {max(values):.3f}" for key, values in by.items())
        yield f"{name}, {'threshold' if threshold else 'fixed lengths'}, {len(group)} seeds: {shown}"


def count(answers: Answers) -> int:
    return sum(len(text.tokens) for text in answers.texts)


def best(name: str, folder: Path, share: float, target: Any, records: Any) -> Row:
    """A draft on the trunk with the fixed length that is worth most by weights."""
    candidates = []
    for length in range(1, LONGEST + 1):
        one = evaluate_drafts(target, records, [name], length)[name]
        shown = name if name.startswith("early") else f"imitation@{folder.name.removeprefix('n')}"
        candidates.append(Row(shown, length, share, one.alpha, one.tau, one.proposed / one.cycles))
    return max(candidates, key=lambda row: row.speedup)


def of(name: str, length: int | str, share: float, skip: Sublayers, stats: list[Stats]) -> Row:
    total = Stats.total(stats)
    return Row(name, length, share, total.alpha or 0.0, total.tau, total.proposed / total.cycles, skip)


def line(row: Row) -> str:
    out = "" if row.skip is None else f"attention {numbers(row.skip.attention)}; MLP {numbers(row.skip.mlp)}"
    chain = row.length if isinstance(row.length, str) else f"d = {row.length}"
    return (
        f"| {row.draft} | {chain} | {out} | {row.share:.0%} | {row.alpha:.3f} | {row.tau:.2f} | {row.drafted:.2f} "
        f"| {row.speedup:.2f} × |"
    )


def numbers(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers)) or "none"


if __name__ == "__main__":
    main()
