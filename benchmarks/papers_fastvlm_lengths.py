"""FastVLM's choices beside their alternatives: draft lengths by position (eq. 5) against fixed ones, and the layer n by the
reward C − λ l (section 3.3) against the layer that is predicted to be fastest.

    python -m benchmarks.papers_fastvlm_lengths

builds tiny-blip2-flant5 with its shipped drafts at n = 3 and n = 6, decodes held-out captions under every policy and counts
cycles; no time is measured. Speed-ups are those of two tables of pass times: `memory`, where a pass takes as long as
reading its weights (a large model), and `cache`, where the width of a pass is paid for (this model). Writes
results/papers-fastvlm-lengths.json.

    python -m benchmarks.papers_fastvlm_lengths --seeds runs/seeds/tiny-blip2-flant5-512-300-[0-2]

does the same with the imitation drafts of bundles that `papers_fastvlm_seeds.py` built, one a seed, and writes
results/papers-fastvlm-lengths-seeds.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmexport.calibration.calibrate import read_requests
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Bundle, Session
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.stored_costs import FROM_CACHE, FROM_MEMORY, default_draft
from vlmexport.runtime.measure.virtual_clock import decoding
from vlmexport.runtime.policy.logistic import LogisticLength
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable, Curve
from vlmexport.runtime.speedup.predict import AcceptanceCounts, choose, choose_by_reward, predictions
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.intervals import between
from benchmarks.machine import save

MODEL = "tiny-blip2-flant5"
LAYERS = (3, 6)
KINDS = ("imitation", "early-exit")
FIXED = (1, 2, 3, 4, 5, 6, 8, 10, 14)
PAPER = (5, 8)
"""The paper's fixed d: of questions, and of captions."""
CHAIN = 10
"""Drafted tokens of the chains that lengths and layers are chosen by."""
CURVES = {"memory": FROM_MEMORY, "cache": FROM_CACHE}
BY_POSITION = "d(t), eq. 5"
POLICIES: Mapping[str, Mapping[str, Any]] = {
    **{f"d = {length}": {"draft_length": length} for length in FIXED},
    BY_POSITION: {},
    "controller": {"adaptive": "request"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument(
        "--seeds", nargs="+", type=Path, metavar="BUNDLE", help="in place of the shipped drafts"
    )
    options = parser.parse_args()
    settings = {"model": MODEL, "requests": options.requests, "max_new_tokens": options.max_new_tokens}
    script = {"script": "benchmarks/papers_fastvlm_lengths.py", **settings}
    if options.seeds:
        rows = over_seeds([measured(path, ("imitation",), LAYERS, options).rows for path in options.seeds])
        tell_seeds(rows)
        print(save("papers-fastvlm-lengths-seeds", {**script, "seeds": len(options.seeds), "rows": rows}))
        return
    bundles: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        for layer in LAYERS:
            path = Path(folder) / str(layer)
            build_bundle(BuildRequest(model=MODEL, output=path, draft_layer=layer, parity=False))
            bundles.append(measured(path, KINDS, (layer,), options))
    rows = [row for bundle in bundles for row in bundle.rows]
    tell(rows)
    layers = {f"{kind}@{layer}": layer for kind in KINDS for layer in LAYERS}
    observed = [one for bundle in bundles for one in bundle.observed]
    choices = {}
    for name, curve in CURVES.items():
        costs = {draft: cost for bundle in bundles for draft, cost in bundle.tables[name].drafts.items()}
        choices[name] = chosen(CostTable(Curve(curve), costs), observed, layers, bundles[0].depth)
    for name, choice in choices.items():
        print(f"{name}: by reward {choice['by_reward']}, by prediction {choice['by_prediction']}")
    print(save("papers-fastvlm-lengths", {**script, "rows": rows, "choices": choices}))


@dataclass(frozen=True)
class Measured:
    """What every policy did with the drafts of a bundle whose decoder has `depth` layers."""

    rows: list[dict[str, Any]]
    observed: list[AcceptanceCounts]
    """Of the chains that lengths and layers are chosen by."""
    tables: Mapping[str, CostTable]
    depth: int


def measured(
    path: Path, kinds: Sequence[str], layers: Sequence[int], options: argparse.Namespace
) -> Measured:
    """Held-out captions by a bundle, under every policy with every draft of these kinds after these layers."""
    manifest = Bundle.open(path).manifest
    tables = {name: _costs(name, manifest) for name in CURVES}
    result = Measured([], [], tables, manifest.decoder.num_layers)
    requests = read_requests(manifest, ["scenes:heldout"], options.requests)
    with Session.load(path) as session:
        for draft in (f"{kind}@{layer}" for layer in layers for kind in kinds):
            for policy, how in POLICIES.items():
                if policy == BY_POSITION:
                    how = {"policy": LogisticLength.of(options.max_new_tokens, manifest.widest_tree - 1)}
                asked = {"max_new_tokens": options.max_new_tokens, "draft": draft, **how}
                stats = Stats.total(session.generate(**request, **asked).stats for request in requests)
                result.rows.append(row(draft, policy, stats, tables))
                if how.get("draft_length") == CHAIN:
                    result.observed.append(AcceptanceCounts.of(draft, Budget.chain(CHAIN), stats))
    return result


def over_seeds(seeds: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of the same draft and policy of every seed as one, with lists in seeds' order."""
    joined = []
    for each in zip(*seeds, strict=True):
        first = each[0]
        assert len({(one["draft"], one["policy"]) for one in each}) == 1, "the same drafts"
        joined.append(
            {
                "draft": first["draft"],
                "policy": first["policy"],
                **{name: [one[name] for one in each] for name in ("tau", "drafted", "accepted_share")},
                "speedup": {name: [one["speedup"][name] for one in each] for name in CURVES},
            }
        )
    return joined


def tell_seeds(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the table for people: means with the least and the most of the seeds."""
    print("| draft | policy | tau | drafted a cycle | speed-up, memory | cache |")
    print("|---|---|---|---|---|---|")
    for each in rows:
        speeds = " | ".join(f"{between(each['speedup'][name], '.2f')} ×" for name in CURVES)
        drafted = statistics.mean(each["drafted"])
        print(
            f"| {each['draft']} | {each['policy']} | {between(each['tau'], '.2f')} | {drafted:.2f} | {speeds} |"
        )


def _costs(name: str, manifest: Manifest) -> CostTable:
    """The table of that name, with the drafts of a bundle."""
    plain = Curve(CURVES[name])
    return CostTable(plain, {draft.name: default_draft(manifest, draft, plain) for draft in manifest.drafts})


def row(draft: str, policy: str, stats: Stats, tables: Mapping[str, CostTable]) -> dict[str, Any]:
    """What a policy did with a draft."""
    emitted = stats.tokens - stats.requests
    return {
        "draft": draft,
        "policy": policy,
        "tau": round(emitted / stats.cycles, 3),
        "drafted": round(stats.proposed / stats.cycles, 3),
        "accepted_share": round(stats.accepted / stats.proposed, 4) if stats.proposed else None,
        "speedup": {name: round(decoding(table, draft, stats).speedup, 3) for name, table in tables.items()},
    }


def chosen(
    table: CostTable, observed: list[AcceptanceCounts], layers: Mapping[str, int], count: int
) -> dict[str, Any]:
    """The draft by FastVLM's reward for several λ, in a decoder of `count` layers, and by predicted speed-up, each with the chain that is fastest then."""
    choice: dict[str, Any] = {"by_reward": {}}
    for name, weight in (("1/L", 1 / count), ("2/L", 2 / count), ("3/L", 3 / count)):
        best = choose_by_reward(table, observed, layers, weight)
        assert best is not None
        choice["by_reward"][name] = described(best)
    fastest = choose(table, observed, least=0.0)
    assert fastest is not None
    choice["by_prediction"] = described(fastest)
    choice["all"] = {}
    for entry in predictions(table, observed):  # fastest first
        choice["all"].setdefault(entry.draft, described(entry))
    return choice


def described(entry: Any) -> dict[str, Any]:
    return {"draft": entry.draft, "d": entry.budget.depth, "speedup": round(entry.speedup, 3)}


def tell(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print the table for people."""
    print("| draft | policy | tau | drafted a cycle | accepted | speed-up, memory | cache |")
    print("|---|---|---|---|---|---|---|")
    for each in rows:
        share = "" if each["accepted_share"] is None else f"{100 * each['accepted_share']:.1f} %"
        print(
            f"| {each['draft']} | {each['policy']} | {each['tau']:.2f} | {each['drafted']:.2f} | {share} "
            f"| {each['speedup']['memory']:.2f} × | {each['speedup']['cache']:.2f} × |"
        )


if __name__ == "__main__":
    main()
