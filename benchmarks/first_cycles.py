"""What a cycle takes by its place in a request, plain and speculative requests in turn.

    vlmexport build --model tiny-blip2-flant5 --draft medusa --draft imitation --draft-layer 3 --max-width 17 -o runs/tiny
    python -m benchmarks.first_cycles runs/tiny

After a picture, a prompt and requests of the other kind, a processor needs some cycles to get back to the speed that
repetition measures.
"""

from __future__ import annotations

import argparse
import statistics
from time import perf_counter
from typing import Any

from benchmarks.machine import save

SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20)
"""Cycles that are reported, counted from 1."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--save", default="first-cycles-tiny", metavar="NAME")
    options = parser.parse_args()
    from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene
    from vlmexport.runtime import Session
    from vlmexport.runtime.speculative.cycle import Cycle

    taken: list[float] = []
    whole = Cycle.run

    def run(cycle: Any) -> list[list[int]]:
        begin = perf_counter()
        emitted = whole(cycle)
        taken.append(perf_counter() - begin)
        return emitted

    Cycle.run = run  # type: ignore[method-assign]
    session = Session.load(options.bundle)
    pictures = [render(sample_scene(0, HELDOUT[at])) for at in range(8)]
    cycles: dict[str, list[list[float]]] = {"plain": [], "speculative": []}
    for at in range(-2, options.rounds):
        for way, requests in cycles.items():
            taken.clear()
            session.generate(
                image=pictures[at % 8], max_new_tokens=96, ignore_eos=True, speculative=way != "plain"
            )
            if at >= 0:
                requests.append(list(taken))
    medians = {
        way: {
            str(place): 1e3 * statistics.median(request[place - 1] for request in requests if len(request) >= place)
            for place in SHOWN
        }
        for way, requests in cycles.items()
    }  # fmt: skip
    for way, values in medians.items():
        print(f"{way:<12}", ", ".join(f"{place}: {value:.2f}" for place, value in values.items()), "ms")
    print(save(options.save, {"script": "benchmarks/first_cycles.py", "bundle": session.bundle.manifest.model.source,
                              "draft": session.bundle.manifest.policy.draft, "milliseconds": medians}))  # fmt: skip


if __name__ == "__main__":
    main()
