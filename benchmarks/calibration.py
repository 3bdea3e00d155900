"""Is what `vlmexport tune` predicts what happens on other requests, and is there nothing better than its choice?

A bundle, in a copy, is calibrated on some requests and measured on others, in one session: every draft decodes the first
ones (`Calibration.survey`), then come blocks, each a look at a part of these (`Calibration.look`), whose minutes make the
prediction, and right after it a part of the others, in every way of drafting, each beside plain decoding and in another
order each time. What the first requests rule out is left out of the rest. The best of all is found by every second request
and judged by the others, or chance would make it. Plain decoding is measured as a way, too: where it is not as fast as
itself, the run counts for nothing. At the end the choice is measured once more, and what a session does by itself (the
controller on); neither is judged.

`--counted` compares without a clock: what the two parts accept, both on the default table of costs. That is the part of
the question which a busy machine can answer.

    python -m benchmarks.calibration tiny-blip2-flant5 --draft medusa --draft imitation --draft-layer 3
    python -m benchmarks.calibration tiny-vit-gpt2 --draft medusa --draft imitation --draft-layer 3 --data scenes-captions:heldout:192
    python -m benchmarks.calibration --bundle runs/smollm2-bundle --name smollm2 --data prompts.jsonl --calibrate-on 10 --requests 10 --max-new-tokens 80 --of-prediction 0.95
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from vlmexport.calibration.calibrate import read_requests
from vlmexport.runtime import Bundle, Session
from vlmexport.runtime.bundle.manifest import Manifest
from vlmexport.runtime.bundle.manifest_changes import store_costs
from vlmexport.runtime.bundle.stored_costs import StoredChoice, default_costs
from vlmexport.runtime.speedup.budget import Budget
from vlmexport.runtime.speedup.cost_model import CostTable
from vlmexport.runtime.speedup.predict import AcceptanceCounts, choose, predictions
from vlmexport.runtime.speedup.stats import Stats
from vlmexport.runtime.tuning.ab_runs import Arm, Turn, by_request, decode, speedup, tokens_per_cycle
from vlmexport.runtime.tuning.bootstrap import interval
from vlmexport.runtime.tuning.survey import Calibration, budgets

from benchmarks.machine import save

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)
NEAR = 0.95
"""Share of the best speed that a good choice reaches."""
WORTH = 1.25
"""Speed-up that a bundled model's choice reaches."""
FIRST = 4
"""Requests that are decoded in every way."""
CLOSE = 0.75
"""Share of the best speed in these, below which a way is not decoded again."""
STEADY = (0.97, 1.03)
"""Speed of plain decoding over plain decoding, in the same blocks, outside of which a run says nothing."""

Requests = Sequence[Mapping[str, Any]]
Ways = Mapping[str, Mapping[str, Any]]
"""Options of `Session.generate` by name."""
TurnsByWay = dict[str, list[Turn]]


def every_way(manifest: Manifest, contenders: Iterable[Arm]) -> Ways:
    """Plain decoding, every draft at fixed lengths and trees, and what calibrate may choose."""
    arms = [Arm(), *contenders]
    for draft in manifest.drafts:
        for budget in budgets(draft, manifest.widest_tree - 1):
            arms.append(Arm(draft.name, budget))
            if budget.nodes == budget.depth:
                shorter = (Budget.chain(length) for length in LENGTHS if length < budget.depth)
                arms += [Arm(draft.name, each) for each in shorter]
    return {named(arm.draft, arm.budget): arm.options for arm in arms}


def named(draft: str | None, budget: Budget | None) -> str:
    """A way in words."""
    if draft is None or budget is None:
        return "plain"
    if budget.nodes > budget.depth:
        return f"{draft}, tree of {budget.nodes}, {budget.depth} deep"
    return f"{draft} × {budget.depth}"


def build(model: str, path: Path, drafts: list[str], layer: int | None) -> None:
    """A bundle, by a process of its own: the threads that a build starts would serve a session of this one, too."""
    words = [sys.executable, "-m", "vlmexport", "build", "--model", model, "-o", str(path)]
    words += [word for draft in drafts for word in ("--draft", draft)]
    words += [] if layer is None else ["--draft-layer", str(layer)]
    subprocess.run(words, check=True)


def halves(manifest: Manifest, data: str, calibrate_on: int, count: int) -> tuple[Requests, Requests]:
    """The first `calibrate_on` requests and the `count` that follow. SystemExit where there are fewer."""
    requests = read_requests(manifest, [data], calibrate_on + count)
    if len(requests) < calibrate_on + count:
        raise SystemExit(f"--data {data} has {len(requests)} requests, {calibrate_on + count} are needed")
    return requests[:calibrate_on], requests[calibrate_on:]


def parts(requests: Requests, count: int) -> list[Requests]:
    """The requests in so many parts, one behind the other, as equal as can be."""
    edges = [len(requests) * at // count for at in range(count + 1)]
    return [requests[first:last] for first, last in pairwise(edges)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--bundle", type=Path, help="one that was built before, in place of a model")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--draft-layer", type=int)
    parser.add_argument("--name", help="of the file of results; default: the model")
    parser.add_argument("--data", default="scenes:heldout:192")
    parser.add_argument("--calibrate-on", type=int, default=64, help="requests that calibrate sees")
    parser.add_argument("--requests", type=int, default=80, help="requests that are measured, after those")
    parser.add_argument("--blocks", type=int, default=5, help="parts that both are cut into")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--of-prediction", type=float, default=0.9, help="share that the choice has to reach")
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
        "blocks": options.blocks,
        "max_new_tokens": options.max_new_tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        if options.bundle is not None:
            shutil.copytree(options.bundle, path)
        else:
            build(options.model, path, options.draft, options.draft_layer)
        seen, unseen = halves(
            Bundle.open(path).manifest, options.data, options.calibrate_on, options.requests
        )
        if options.counted:
            with Session.load(path) as session:
                known, there = (
                    observe(session, requests, options.max_new_tokens) for requests in (seen, unseen)
                )
                outcome = counted(default_costs(session.bundle.manifest), known, there)
            print(
                f"chosen {outcome['chosen']}: {outcome['speedup']:.3f} x on the others ({outcome['predicted']:.3f} x predicted)"
            )
            print(
                f"best there: {outcome['best']}, {outcome['best_speedup']:.3f} x; {verdict(outcome['of_best'])}"
            )
            print(save(f"calibration-{name}-counted", {**about, **outcome}))
            return
        begin = time.perf_counter()
        with Session.load(path) as session:
            calibration, turns, speeds, others = in_blocks(
                session, seen, unseen, options.data, options.blocks, options.max_new_tokens
            )
            report = calibration.report()
        choice = StoredChoice.parse(report["costs"]["choice"], "choice")
        looked = next((arm for arm in calibration.contenders if _is(arm, choice)), Arm())
        result = compare(choice, looked.halves[1] if looked.turns else [], turns, options.of_prediction)
        store_costs(path, [report["costs"]], report["acceptance"], anew=True)
        later = {"session": {}, result["chosen"]: Arm(choice.draft, choice.budget).options}
        with Session.load(path) as session:
            again = measure(session, later, unseen, options.max_new_tokens)
    result["later"] = round(speedup(again[result["chosen"]]), 3)
    result["session_of_choice"] = round(speedup(again["session"]) / speedup(again[result["chosen"]]), 3)
    result["others"] = others
    result["plain_tokens_per_second"] = speeds
    result["minutes"] = round((time.perf_counter() - begin) / 60, 1)
    tell(result)
    result |= {"predictions": report["predictions"], "costs": report["costs"]}
    print(save(f"calibration-{name}", {**about, **result}))


def in_blocks(
    session: Session, seen: Requests, unseen: Requests, data: str, blocks: int, max_new_tokens: int
) -> tuple[Calibration, TurnsByWay, list[dict[str, float]], dict[str, float]]:
    """(the calibration of the seen requests, turns of the unseen ones by way, plain tokens per second of both in every
    block, speed-ups of what the first requests ruled out)."""
    calibration = Calibration(session, data, max_new_tokens=max_new_tokens)
    calibration.survey(seen)
    contenders = calibration.contenders
    ways = every_way(session.bundle.manifest, contenders)
    kept = {named(arm.draft, arm.budget) for arm in contenders}
    turns_by_way: TurnsByWay = {name: [] for name in ways}
    speeds: list[dict[str, float]] = []
    others: dict[str, float] = {}
    first = 0
    for look, rest in zip(parts(seen, blocks), parts(unseen, blocks), strict=True):
        before = [len(arm.turns) for arm in contenders]
        calibration.look(look)
        looked = chain.from_iterable(arm.turns[n:] for arm, n in zip(contenders, before, strict=True))
        taken: list[Turn] = []
        for some in (rest[:FIRST], rest[FIRST:]) if not first else (rest,):
            for name, turns in measure(session, ways, some, max_new_tokens, first).items():
                turns_by_way[name] += turns
                taken += turns
            if not first:
                close = close_to_best(turns_by_way, kept)
                others = {
                    name: round(speedup(turns_by_way.pop(name)), 3) for name in ways if name not in close
                }
                ways = {name: how for name, how in ways.items() if name in close}
            first += len(some)
        speeds.append({"look": plain_speed(looked), "measured": plain_speed(taken)})
        print(f"{first} of {len(unseen)} requests, {len(ways)} ways", file=sys.stderr)
    return calibration, turns_by_way, speeds, others


def _is(arm: Arm, choice: StoredChoice) -> bool:
    return choice.draft is not None and (arm.draft, arm.budget) == (choice.draft, choice.budget)


def plain_speed(turns: Iterable[Turn]) -> float:
    """Tokens per second of plain decoding; 0 without a turn."""
    plain = Stats.total(turn.plain for turn in turns)
    return round(plain.tokens_per_second or 0.0, 1)


def tell(result: Mapping[str, Any]) -> None:
    """Print the result for people."""
    rows = {**result["others"], **result["speedups"]}
    for arm, value in sorted(rows.items(), key=lambda entry: -entry[1]):
        print(f"  {value:5.2f} x  {arm}")
    print(
        f"chosen {result['chosen']}: predicted {result['predicted']:.3f} x {result['predicted_interval']}, measured "
        f"{result['measured']:.3f} x {result['measured_interval']}, {100 * result['of_prediction']:.1f} % "
        f"{result['of_prediction_interval']}: tokens {result['tokens_ratio']:.3f} x time {result['time_ratio']:.3f}"
    )
    print(f"best of all tried: {result['best']}; the choice: {verdict(result['of_best'])}")
    print(f"plain over plain {result['plain_of_plain']:.3f}; judged: {result['judged']}")
    print(
        f"minutes later {result['later']:.3f} x; a session with its controller: {100 * result['session_of_choice']:.1f} % of it"
    )
    if result["discarded"]:
        print(
            f"DISCARDED: plain decoding was not as fast as itself, within {STEADY}: the machine was not steady"
        )


def verdict(of_best: float) -> str:
    """A share of the best speed in words."""
    return f"{100 * of_best:.1f} % of it, {'within' if of_best >= NEAR else 'not within'} {100 * (1 - NEAR):.0f} %"


def close_to_best(turns_by_way: Mapping[str, Sequence[Turn]], kept: set[str]) -> set[str]:
    """Plain decoding, what is `kept`, and all that the first requests do not rule out."""
    speedups = {name: speedup(turns) for name, turns in turns_by_way.items()}
    least = CLOSE * max(speedups.values())
    return {"plain"} | kept | {name for name, value in speedups.items() if value >= least}


def compare(
    choice: StoredChoice,
    looked: Sequence[Turn],
    turns_by_way: Mapping[str, Sequence[Turn]],
    of_prediction: float,
) -> dict[str, Any]:
    """The choice against its prediction and against the best of all ways. `looked`: the turns that the prediction was made
    of, none where plain decoding was chosen."""
    chosen = named(choice.draft, choice.budget)
    arms = {name: Arm(turns=list(turns)) for name, turns in turns_by_way.items()}
    speedups = {name: speedup(arm.turns) for name, arm in arms.items()}
    best = max(arms, key=lambda name: speedup(arms[name].halves[0]))
    of_best = speedup(arms[chosen].halves[1]) / speedup(arms[best].halves[1])
    predicted, measured, steady = choice.speedup or 1.0, speedups[chosen], speedups["plain"]
    mine = by_request(arms[chosen].turns)
    tokens = tokens_per_cycle(arms[chosen].turns) / (choice.tokens_per_cycle or 1.0)
    discarded = not STEADY[0] <= steady <= STEADY[1]
    return {
        "chosen": chosen,
        "predicted": round(predicted, 3),
        "predicted_interval": rounded(choice.interval),
        "measured": round(measured, 3),
        "measured_interval": rounded(interval(_speedup, mine)),
        "of_prediction": round(measured / predicted, 3),
        "of_prediction_interval": rounded(
            interval(lambda there, here: _speedup(there) / _speedup(here), mine, by_request(looked))
        ),
        "tokens_ratio": round(tokens, 3),
        "time_ratio": round(measured / predicted / tokens, 3),
        "best": best,
        "of_best": round(of_best, 3),
        "plain_of_plain": round(steady, 3),
        "discarded": discarded,
        "judged": None
        if discarded
        else {
            f"prediction, {of_prediction:g}": bool(measured / predicted >= of_prediction),
            f"speed-up, {WORTH:g}": bool(measured >= WORTH),
            f"best, {NEAR:g}": bool(of_best >= NEAR),
        },
        "speedups": {name: round(value, 3) for name, value in speedups.items()},
    }


def _speedup(requests: Sequence[Sequence[Turn]]) -> float:
    return speedup(list(chain.from_iterable(requests)))


def rounded(between: Sequence[float] | None) -> list[float] | None:
    return None if between is None else [round(value, 3) for value in between]


def observe(session: Session, requests: Requests, max_new_tokens: int) -> list[AcceptanceCounts]:
    """What every draft accepts under every budget that `tune` tries."""
    counts = []
    for draft in session.bundle.manifest.drafts:
        for budget in budgets(draft, session.bundle.manifest.widest_tree - 1):
            arm = Arm(draft.name, budget)
            arm.decoded += [decode(session, r, arm.options, max_new_tokens, 1).stats for r in requests]
            counts.append(arm.observed)
    return counts


def counted(table: CostTable, seen: list[AcceptanceCounts], unseen: list[AcceptanceCounts]) -> dict[str, Any]:
    """The choice by what was `seen`, as the table predicts it there and as it is by what was `unseen`; `of_best` is its
    speed there over that of the best choice. Plain decoding is a choice, too."""
    chosen = choose(table, seen)
    speeds = {(p.draft, p.budget): p.speedup for p in predictions(table, unseen)}
    best = max(speeds, key=speeds.__getitem__, default=None)
    highest = max(1.0, *speeds.values()) if speeds else 1.0
    reached = 1.0 if chosen is None else speeds[chosen.draft, chosen.budget]
    return {
        "chosen": "plain" if chosen is None else named(chosen.draft, chosen.budget),
        "predicted": round(1.0 if chosen is None else chosen.speedup, 4),
        "speedup": round(reached, 4),
        "best": "plain" if best is None or speeds[best] < 1.0 else named(*best),
        "best_speedup": round(highest, 4),
        "of_best": round(reached / highest, 4),
        "tried": len(speeds) + 1,
    }


def measure(
    session: Session, ways: Ways, requests: Requests, max_new_tokens: int, first: int = 0
) -> TurnsByWay:
    """Every request in all ways, each beside plain decoding. `first`: the number of the first request."""
    shuffle, order = random.Random(first), list(ways)
    turns_by_way: TurnsByWay = {name: [] for name in ways}
    for number, request in enumerate(requests, first):
        for name in shuffle.sample(order, len(order)):
            plain, other = (
                decode(session, request, how, max_new_tokens) for how in (Arm().options, ways[name])
            )
            if list(other.tokens) != list(plain.tokens):
                raise SystemExit(f"{name}: the output differs from that of plain decoding")
            if plain.stats.cycles:
                turns_by_way[name].append(Turn(number, plain.stats, other.stats))
    return turns_by_way


if __name__ == "__main__":
    main()
