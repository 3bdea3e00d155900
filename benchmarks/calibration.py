"""Does `vlmexport calibrate` choose well? Its choice against every other draft, length and tree, and against its own
prediction, on requests that it did not see.

A bundle is calibrated on the first half of some requests, in a copy. Then the other half is decoded with the choice as it
stands, as a session takes it (the controller on), and with every draft at fixed lengths and trees: every request in all
ways, in another order each time, each beside plain decoding. What a first round does not rule out is decoded in --rounds
more, which alone count; the best of all is found by every second turn and judged by the others, or chance would make it. `--counted` compares without a clock: what
the two halves accept, both on the default table of costs. That is the part of the question which a busy machine can
answer.

    python benchmarks/calibration.py tiny-blip2-flant5 --draft medusa --draft imitation --draft-layer 3
    python benchmarks/calibration.py tiny-vit-gpt2 --draft medusa --draft imitation --draft-layer 3 --data scenes-captions:heldout:64
    python benchmarks/calibration.py --bundle runs/smollm2-bundle --name smollm2 --data prompts.jsonl --requests 4
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import save
from vlmexport.calibration.data import load_records
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import store_costs
from vlmexport.runtime.measure.calibration import budgets, calibrate
from vlmexport.runtime.speculate.budget import Budget
from vlmexport.runtime.speculate.choice import Observed, choose, predictions
from vlmexport.runtime.speculate.costs import CostTable
from vlmexport.runtime.speculate.stats import Stats
from vlmexport.runtime.speculate.stored_costs import StoredChoice, default_costs

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
NEAR = 0.95
"""Share of the best speed that a good choice reaches."""
CLOSE = 0.75
"""Share of the best speed at a first look, below which a way is not looked at again."""

Requests = list[dict[str, Any]]
Pair = tuple[float, float]
"""Seconds of plain decoding and of another way, of the same request."""


def fixed(draft: str, budget: Budget) -> dict[str, Any]:
    """Options of `Session.generate` that always draft by this budget."""
    nodes = budget.nodes if budget.nodes > budget.depth else None
    return {"draft": draft, "draft_length": budget.depth, "draft_nodes": nodes}


def arms(session: Session, choice: StoredChoice) -> tuple[str, dict[str, dict[str, Any]]]:
    """(name of the choice, name → options of `Session.generate`); "session" is what a session does by itself."""
    manifest = session.bundle.manifest
    found: dict[str, dict[str, Any]] = {"plain": {"draft": "none"}, "session": {}}
    for draft in manifest.drafts:
        for budget in budgets(draft, manifest.limits.max_width - 1):
            lengths = [budget]
            if budget.nodes == budget.depth:
                lengths = [Budget.chain(length) for length in LENGTHS if length <= budget.depth]
            found |= {_named(draft.name, each): fixed(draft.name, each) for each in lengths}
    if choice.draft is None or choice.draft_length is None:
        return "plain", found
    chosen = Budget(choice.draft_nodes or choice.draft_length, choice.draft_length)
    name = _named(choice.draft, chosen)
    return name, {**found, name: fixed(choice.draft, chosen)}


def build(model: str, path: Path, drafts: list[str], layer: int | None) -> None:
    """A bundle, by a process of its own: the threads that a build starts would serve a session of this one, too."""
    words = [sys.executable, "-m", "vlmexport", "build", "--model", model, "-o", str(path)]
    words += [word for draft in drafts for word in ("--draft", draft)]
    words += [] if layer is None else ["--draft-layer", str(layer)]
    subprocess.run(words, check=True)


def halves(data: str, calibrate_on: int, count: int) -> tuple[Requests, Requests]:
    """The first `calibrate_on` requests and the `count` that follow. SystemExit where there are fewer."""
    records = list(load_records(data, limit=calibrate_on + count))
    if len(records) < calibrate_on + count:
        raise SystemExit(f"--data {data} has {len(records)} requests, {calibrate_on + count} are needed")
    requests: Requests = [
        {"image": None if record.image is None else record.image.load(), "prompt": record.prompt or None}
        for record in records
    ]
    return requests[:calibrate_on], requests[calibrate_on:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--bundle", type=Path, help="one that was built before, in place of a model")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--draft-layer", type=int)
    parser.add_argument("--name", help="of the file of results; default: the model")
    parser.add_argument("--data", default="scenes:heldout:64")
    parser.add_argument("--calibrate-on", type=int, default=16, help="requests that calibrate sees")
    parser.add_argument("--requests", type=int, default=16, help="requests that are measured, after those")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--counted", action="store_true", help="count on the default table, measure no time")
    options = parser.parse_args()
    if (options.model is None) == (options.bundle is None):
        parser.error("give a model or a --bundle")
    name = (options.name or options.model or options.bundle.name).replace("/", "-")
    about = {
        "script": "benchmarks/calibration.py",
        "model": name,
        "data": options.data,
        "calibrate_on": options.calibrate_on,
        "requests": options.requests,
        "max_new_tokens": options.max_new_tokens,
    }
    seen, unseen = halves(options.data, options.calibrate_on, options.requests)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        if options.bundle is not None:
            shutil.copytree(options.bundle, path)
        else:
            build(options.model, path, options.draft, options.draft_layer)
        if options.counted:
            with Session.load(path) as session:
                known, there = (
                    observe(session, requests, options.max_new_tokens) for requests in (seen, unseen)
                )
                found = counted(default_costs(session.bundle.manifest), known, there)
            print(
                f"chosen {found['chosen']}: {found['speedup']:.3f} x on the other half ({found['predicted']:.3f} x predicted)"
            )
            print(f"best there: {found['best']}, {found['best_speedup']:.3f} x; {verdict(found['of_best'])}")
            print(save(f"calibration-{name}-counted", {**about, **found}))
            return
        with Session.load(path) as session:
            report = calibrate(session, seen, options.data, max_new_tokens=options.max_new_tokens)
        store_costs(path, [report["costs"]], report["acceptance"])
        choice = StoredChoice.parse(report["costs"]["choice"], "choice")
        with Session.load(path) as session:
            chosen, ways = arms(session, choice)
            first = measure(session, ways, unseen, options.max_new_tokens)
            close = contenders(first, chosen)
            again = {name: ways[name] for name in ways if name in close}
            found = measure(session, again, options.rounds * unseen, options.max_new_tokens)
    result = compare(chosen, choice.speedup or 1.0, found)
    result["others"] = {name: round(speedup(pairs), 3) for name, pairs in first.items() if name not in close}
    for arm, value in sorted({**result["others"], **result["speedups"]}.items(), key=lambda entry: -entry[1]):
        print(f"  {value:5.2f} x  {arm}")
    print(
        f"chosen {chosen}: predicted {result['predicted']:.2f} x, "
        f"measured {result['measured']:.2f} x {result['quartiles']}"
    )
    print(f"best of all tried: {result['best']}; the choice: {verdict(result['of_best'])}")
    print(f"a session with its controller: {verdict(result['session_of_best'])}")
    result |= {"rounds": options.rounds, "predictions": report["predictions"]}
    print(save(f"calibration-{name}", {**about, **result}))


def verdict(of_best: float) -> str:
    """A share of the best speed in words."""
    return f"{100 * of_best:.1f} % of it, {'within' if of_best >= NEAR else 'not within'} {100 * (1 - NEAR):.0f} %"


def speedup(pairs: Sequence[Pair]) -> float:
    """Of a way over plain decoding, all its turns together."""
    return sum(plain for plain, _ in pairs) / sum(mine for _, mine in pairs)


def contenders(found: Mapping[str, Sequence[Pair]], chosen: str) -> set[str]:
    """The choice, what a session does by itself, and all that a first look does not rule out."""
    speedups = {name: speedup(pairs) for name, pairs in found.items()}
    least = CLOSE * max(speedups.values())
    return {"session", chosen} | {name for name, value in speedups.items() if value >= least}


def compare(chosen: str, predicted: float, found: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """The choice against the best of all arms, and its speed-up over plain decoding against its prediction."""
    speedups = {name: speedup(pairs) for name, pairs in found.items()}
    best = max((name for name in found if name != "session"), key=lambda name: speedup(found[name][::2]))
    judged = {name: speedup(pairs[1::2]) for name, pairs in found.items()}
    spread = statistics.quantiles([plain / mine for plain, mine in found[chosen]], n=4)
    return {
        "chosen": chosen,
        "predicted": round(predicted, 3),
        "measured": round(speedups[chosen], 3),
        "quartiles": [round(spread[0], 3), round(spread[2], 3)],
        "of_prediction": round(speedups[chosen] / predicted, 3),
        "best": best,
        "of_best": round(judged[chosen] / judged[best], 3),
        "session_of_best": round(judged["session"] / judged[best], 3),
        "speedups": {name: round(value, 3) for name, value in speedups.items()},
    }


def observe(session: Session, requests: Requests, max_new_tokens: int) -> list[Observed]:
    """What every draft accepts under every budget that `calibrate` tries."""
    found = []
    for draft in session.bundle.manifest.drafts:
        for budget in budgets(draft, session.bundle.manifest.limits.max_width - 1):
            how = fixed(draft.name, budget)
            results = [session.generate(**r, max_new_tokens=max_new_tokens, **how) for r in requests]
            found.append(Observed.of(draft.name, budget, Stats.total(result.stats for result in results)))
    return found


def counted(table: CostTable, seen: list[Observed], unseen: list[Observed]) -> dict[str, Any]:
    """The choice by what was `seen`, as the table predicts it there and as it is by what was `unseen`; `of_best` is its
    speed there over that of the best choice. Plain decoding is a choice, too."""
    chosen = choose(table, seen)
    speeds = {(p.draft, p.budget): p.speedup for p in predictions(table, unseen)}
    best = max(speeds, key=speeds.__getitem__, default=None)
    highest = max(1.0, *speeds.values()) if speeds else 1.0
    reached = 1.0 if chosen is None else speeds[chosen.draft, chosen.budget]
    return {
        "chosen": "plain" if chosen is None else _named(chosen.draft, chosen.budget),
        "predicted": round(1.0 if chosen is None else chosen.speedup, 4),
        "speedup": round(reached, 4),
        "best": "plain" if best is None or speeds[best] < 1.0 else _named(*best),
        "best_speedup": round(highest, 4),
        "of_best": round(reached / highest, 4),
        "tried": len(speeds) + 1,
    }


def _named(draft: str, budget: Budget) -> str:
    if budget.nodes > budget.depth:
        return f"{draft}, tree of {budget.nodes}"
    return f"{draft} × {budget.depth}"


def measure(
    session: Session, ways: Mapping[str, dict[str, Any]], requests: Requests, max_new_tokens: int
) -> dict[str, list[Pair]]:
    """Seconds of plain decoding and of every arm just after it, in every turn: a request in all ways, each twice, of which
    the second counts, for which the processor's caches hold what the way needs."""

    def timed(request: dict[str, Any], how: dict[str, Any]) -> tuple[float, list[int]]:
        session.generate(**request, max_new_tokens=max_new_tokens, **how)
        result = session.generate(**request, max_new_tokens=max_new_tokens, **how)
        return result.stats.decode_seconds, list(result.tokens)

    shuffle, order = random.Random(0), list(ways)
    found: dict[str, list[Pair]] = {name: [] for name in ways}
    for request in requests:
        for name in shuffle.sample(order, len(order)):
            (plain, expected), (mine, tokens) = (
                timed(request, how) for how in ({"draft": "none"}, ways[name])
            )
            if tokens != expected:
                raise SystemExit(f"{name}: the output differs from that of plain decoding")
            found[name].append((plain, mine))
    return found


if __name__ == "__main__":
    main()
