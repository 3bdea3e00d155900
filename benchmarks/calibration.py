"""Does `vlmexport calibrate` choose well? Its choice against every other draft, length and tree, and against its own
prediction, on requests that it did not see.

A bundle is calibrated on some requests, in a copy. Then others are decoded plainly, with the choice as a session takes it
(the controller on), and with every draft at fixed lengths and trees, all in turn, in every round in another order.

    python benchmarks/calibration.py tiny-blip2-flant5 --draft medusa --draft imitation --draft-layer 3
    python benchmarks/calibration.py --bundle runs/smollm2-bundle --name smollm2 --data prompts.jsonl --requests 4
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from machine import save
from vlmexport.calibration.data import load_records
from vlmexport.exporter.build import BuildRequest, build_bundle
from vlmexport.runtime import Session
from vlmexport.runtime.bundle.folder import store_costs
from vlmexport.runtime.measure.calibration import budgets, calibrate

LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10)


def arms(session: Session) -> dict[str, dict[str, Any]]:
    """Name → options of `Session.generate`; "chosen" is what a session does by itself."""
    manifest = session.bundle.manifest
    found: dict[str, dict[str, Any]] = {"plain": {"speculative": False}, "chosen": {}}
    for draft in manifest.drafts:
        for budget in budgets(draft, manifest.limits.max_width - 1):
            if budget.nodes > budget.depth:
                tree = {"draft": draft.name, "draft_length": budget.depth, "draft_nodes": budget.nodes}
                found[f"{draft.name}, tree of {budget.nodes}"] = tree
                continue
            for length in LENGTHS:
                if length <= budget.depth:
                    found[f"{draft.name} × {length}"] = {"draft": draft.name, "draft_length": length}
    return found


def requests_of(data: str, count: int, skip: int = 0) -> list[dict[str, Any]]:
    records = list(load_records(data, limit=skip + count))[skip:]
    return [
        {"image": None if record.image is None else record.image.load(), "prompt": record.prompt or None}
        for record in records
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--bundle", type=Path, help="one that was built before, in place of a model")
    parser.add_argument("--draft", action="append", default=[])
    parser.add_argument("--draft-layer", type=int)
    parser.add_argument("--name", help="of the file of results; default: the model")
    parser.add_argument("--data", default="scenes:heldout:64")
    parser.add_argument("--calibrate-on", type=int, default=16, help="requests that calibrate sees")
    parser.add_argument("--requests", type=int, default=8, help="requests that are measured, after those")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle"
        if options.bundle is not None:
            shutil.copytree(options.bundle, path)
        else:
            build_bundle(
                BuildRequest(
                    model=options.model, output=path, draft_layer=options.draft_layer, drafts=options.draft
                )
            )
        seen = requests_of(options.data, options.calibrate_on)
        with Session.load(path) as session:
            report = calibrate(session, seen, options.data, max_new_tokens=options.max_new_tokens)
        store_costs(path, [report["costs"]], report["acceptance"])
        requests = requests_of(options.data, options.requests, options.calibrate_on)
        with Session.load(path) as session:
            rates = measure(session, requests, options.max_new_tokens, options.rounds)
    choice = report["costs"]["choice"]
    speed = {
        name: statistics.median(a / b for a, b in zip(values, rates["plain"], strict=True))
        for name, values in rates.items()
    }
    low, high = (
        pick(a / b for a, b in zip(rates["chosen"], rates["plain"], strict=True)) for pick in (min, max)
    )
    best = max((name for name in speed if name != "chosen"), key=speed.__getitem__)
    # Both by the same rounds: the chosen against the best, round by round.
    of_best = statistics.median(a / b for a, b in zip(rates["chosen"], rates[best], strict=True))
    predicted = choice["speedup"] or 1.0
    print(f"chosen {choice['draft']} × {choice['draft_length']}, nodes {choice['draft_nodes']}")
    print(f"predicted {predicted:.2f} x, measured {speed['chosen']:.2f} x [{low:.2f} - {high:.2f}]")
    print(f"best of all tried: {best}, {speed[best]:.2f} x; the choice reaches {100 * of_best:.0f} % of it")
    for name, value in sorted(speed.items(), key=lambda entry: -entry[1]):
        print(f"  {value:5.2f} x  {name}")
    result = {
        "script": "benchmarks/calibration.py",
        "model": options.name or options.model,
        "data": options.data,
        "requests": options.requests,
        "rounds": options.rounds,
        "choice": choice,
        "predictions": report["predictions"],
        "measured": round(speed["chosen"], 3),
        "lowest": round(low, 3),
        "highest": round(high, 3),
        "of_prediction": round(speed["chosen"] / predicted, 3),
        "best": best,
        "of_best": round(of_best, 3),
        "speedups": {name: round(value, 3) for name, value in speed.items()},
    }
    name = (options.name or options.model).replace("/", "-")
    print(save(f"calibration-{name}", result))


def measure(
    session: Session, requests: list[dict[str, Any]], max_new_tokens: int, rounds: int
) -> dict[str, list[float]]:
    """Decoded tokens per second of every arm in every round; the first round warms up."""
    ways, shuffle = arms(session), random.Random(0)
    order = list(ways)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    said: list[list[int]] | None = None
    for turn in range(rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            results = [session.generate(**r, max_new_tokens=max_new_tokens, **ways[name]) for r in requests]
            tokens = [list(result.tokens) for result in results]
            said = said or tokens
            if tokens != said:
                raise SystemExit(f"{name}: the output differs from that of the others")
            if turn:
                decoded = sum(result.stats.tokens - 1 for result in results)
                rates[name].append(decoded / sum(result.stats.decode_seconds for result in results))
    return rates


if __name__ == "__main__":
    main()
