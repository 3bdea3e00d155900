"""Prompt lookup on a text model: prompts that make it copy, open chat, and both as one workload, against plain decoding.

    python -m benchmarks.smollm2 runs/smollm2
    vlmexport build --model runs/smollm2 -o runs/smollm2-bundle
    vlmexport bench runs/smollm2-bundle --draft prompt-lookup --prompt "What is tea?" --save
    python -m benchmarks.prompt_lookup runs/smollm2-bundle

One session serves everything, as a robot's would; the controller learns across requests. Every request is decoded
plainly and speculatively in turn, in an order that changes; rates are decoded tokens per second. `virtual` is the same
cycles on the stored cost table instead of the clock.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.intervals import with_interval
from benchmarks.machine import save

DRAFT = "prompt-lookup"

DOCUMENTS = (
    "The pump station has three pumps. Pump A moves 40 litres a second and was serviced in March. Pump B moves 25 "
    "litres a second and leaks at the shaft seal. Pump C is a spare and has never been started. The pressure sensor "
    "on the outlet of pump B reads 3.2 bar, and the alarm limit is 4.5 bar.",
    "Shopping list: two litres of milk, a dozen eggs, one loaf of rye bread, 500 grams of butter, three lemons, a bag "
    "of flour, baking powder, vanilla sugar, and a jar of apricot jam. The shop closes at eight in the evening.",
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('sizes must not be negative')\n"
    "    return width * height\n\n\ndef volume(width, height, depth):\n    return area(width, height) * depth",
    "Minutes of the meeting: Anna reported that the new gripper arrives on Tuesday. Boris tested the camera and found "
    "that it overheats after forty minutes. Clara will write the safety manual until the end of the month. The next "
    "meeting is on Friday at ten in room 214.",
)
TASKS = (
    "Repeat the following text word for word:\n\n{}",
    "Copy this text exactly, without any change:\n\n{}",
    "Write the following text again and correct spelling mistakes if there are any:\n\n{}",
)


def copying() -> list[str]:
    """Prompts whose answers stand in them."""
    return [task.format(document) for document in DOCUMENTS for task in TASKS]


def chat(count: int) -> list[str]:
    """Open questions, spread over the kinds of held-out prompts."""
    from recipes.smollm2_prompts import chat_prompts

    heldout = chat_prompts()[1]
    return heldout[:: len(heldout) // count][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--chat", type=int, default=16, help="open prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    from vlmexport.runtime import Session
    from vlmexport.runtime.bundle.stored_costs import pick_costs
    from vlmexport.runtime.hardware.machine import processor
    from vlmexport.runtime.measure.virtual_clock import decoding
    from vlmexport.runtime.policy.adaptive import UNTRAINED_FLOOR

    classes = {"copying": copying(), "open chat": chat(options.chat)}
    asked = [(kind, prompt) for kind, prompts in classes.items() for prompt in prompts]
    random.Random(1).shuffle(asked)  # a workload is a mixture
    rows: list[dict[str, Any]] = []
    rng = random.Random(2)
    with Session.load(options.bundle) as session:
        table = pick_costs(session.bundle.manifest, processor(), session.threads or 1)
        limit = {"max_new_tokens": options.max_new_tokens}
        session.generate(prompt=asked[0][1], speculative=False, **limit)
        for repeat in range(options.repeats):
            for kind, prompt in asked:
                arms: list[dict[str, Any]] = [{"speculative": False}, {"draft": DRAFT}]
                rng.shuffle(arms)
                by_draft = {arm.get("draft"): session.generate(prompt=prompt, **limit, **arm) for arm in arms}
                plain, drafted = by_draft[None], by_draft[DRAFT]
                if plain.tokens != drafted.tokens:
                    raise SystemExit(f"{prompt!r}: speculative tokens differ from plain ones")
                rows.append({
                    "kind": kind, "prompt": prompt, "repeat": repeat, "tokens": len(plain.tokens),
                    "plain": plain.stats.decode_seconds, "drafted": drafted.stats.decode_seconds,
                    "virtual": decoding(table, DRAFT, drafted.stats).speedup,
                    "tau": drafted.stats.tau, "alpha": drafted.stats.alpha,
                })  # fmt: skip

    def by_prompt(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """What is drawn for an interval: prompts with all their repeats, which say little more than one does."""
        return [
            [row for row in rows if row["prompt"] == prompt]
            for prompt in dict.fromkeys(r["prompt"] for r in rows)
        ]

    def speedup(prompts: Sequence[Sequence[dict[str, Any]]]) -> float:
        pairs = [row for prompt in prompts for row in prompt]
        return sum(row["plain"] for row in pairs) / sum(row["drafted"] for row in pairs)

    result: dict[str, Any] = {"script": "benchmarks/prompt_lookup.py", "repeats": options.repeats}
    for kind, prompts in classes.items():
        mine = [row for row in rows if row["kind"] == kind]
        result[kind] = {
            "prompts": len(prompts),
            "tokens": sum(row["tokens"] for row in mine) // options.repeats,
            "speedup": with_interval(by_prompt(mine), speedup, "value"),
            "tau": statistics.mean(row["tau"] for row in mine),
            "virtual": {
                "mean": statistics.mean(r["virtual"] for r in mine),
                "min": min(r["virtual"] for r in mine),
            },
        }
    by_repeat = [speedup([[row for row in rows if row["repeat"] == n]]) for n in range(options.repeats)]
    result["workload"] = {
        "speedup": with_interval(by_prompt(rows), speedup, "value"),
        "by_repeat": by_repeat,
        "worst_prompt_virtual": {
            "of all": min(row["virtual"] for row in rows),
            f"of more than {UNTRAINED_FLOOR} tokens": min(
                (row["virtual"] for row in rows if row["tokens"] > UNTRAINED_FLOOR), default=None
            ),
        },
        "table": "stored" if session.bundle.manifest.costs else "default",
    }
    print(json.dumps(result, indent=1))
    if options.save:
        print(save(options.save, result))


if __name__ == "__main__":
    main()
