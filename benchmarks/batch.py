"""A batch of requests decoded together against one after the other: the same tokens, tokens per second of both.

    vlmexport build --model tiny-blip2-flant5 --max-batch 16 -o runs/tiny
    python -m benchmarks.batch runs/tiny

Plain decoding with end tokens ignored, so that both arms decode the same number of tokens at the same lengths; the arms
take turns. Requests differ: pictures and prompts of the scenes, or chat prompts for a text model. `whole` counts the
time from the call to the last token (pictures, encoder and prefill included), `decode` from the first token on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.intervals import with_interval
from benchmarks.machine import save


def requests(manifest: Any, count: int, tokens: int) -> list[dict[str, Any]]:
    """Ragged requests: other pictures, other prompts."""
    limits: dict[str, Any] = {"max_new_tokens": tokens, "speculative": False, "ignore_eos": True}
    if manifest.image is None:
        from recipes.smollm2_prompts import chat_prompts

        heldout = chat_prompts()[1]
        return [{"prompt": p, **limits} for p in heldout[:: len(heldout) // count][:count]]
    from vlmexport.calibration.data.scenes import HELDOUT, render, sample_scene

    return [{"image": render(sample_scene(0, HELDOUT[n])), **limits} for n in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json")
    options = parser.parse_args()
    from vlmexport.runtime import Session

    rows: list[dict[str, float]] = []
    with Session.load(options.bundle, max_batch=options.batch, picture_cache=0) as session:
        asked = requests(session.bundle.manifest, options.batch, options.tokens)
        one = session.generate(**asked[0])
        session.generate_batch(asked)
        differences = 0
        for _ in range(options.repeats):
            begin = time.perf_counter()
            alone = [session.generate(**request) for request in asked]
            middle = time.perf_counter()
            together = session.generate_batch(asked)
            end = time.perf_counter()
            count = sum(len(result.tokens) for result in alone)
            differences = sum(a.tokens != b.tokens for a, b in zip(alone, together, strict=True))
            rows.append({
                "alone": count / (middle - begin),
                "together": count / (end - middle),
                "alone_decode": (count - len(asked)) / sum(r.stats.decode_seconds for r in alone),
                "together_decode": (count - len(asked)) / max(r.stats.decode_seconds for r in together),
            })  # fmt: skip
    result = {
        "script": "benchmarks/batch.py", "batch": options.batch, "tokens": len(one.tokens), "repeats": options.repeats,
        "tokens_per_second": {name: statistics.median(row[name] for row in rows) for name in rows[0]},
        "whole": with_interval([row["together"] / row["alone"] for row in rows]),
        "decode": with_interval([row["together_decode"] / row["alone_decode"] for row in rows]),
        "requests_with_near_ties": differences,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.save:
        print(save(options.save, result))


if __name__ == "__main__":
    main()
