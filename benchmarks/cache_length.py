"""A long KV buffer costs nothing until it is used: max_length 4,096 against 512 at equal length.

python -m benchmarks.cache_length runs/smollm2-bundle
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from benchmarks.machine import save


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    options = parser.parse_args()
    from vlmexport.runtime import Session

    ids = list(range(100, 164))
    seconds: dict[int, list[float]] = {512: [], 4096: []}
    sessions = {n: Session.load(options.bundle, threads=2, max_length=n) for n in seconds}
    for repeat in range(options.rounds + 1):
        for n, session in sessions.items():
            begin = time.perf_counter()
            result = session.generate_tokens(
                ids, max_new_tokens=options.new_tokens, speculative=False, ignore_eos=True
            )
            if repeat:  # the first round warms up
                total = time.perf_counter() - begin - result.stats.time_to_first_token
                seconds[n].append(total / (options.new_tokens - 1))
    ratio = statistics.median(b / a for a, b in zip(seconds[512], seconds[4096], strict=True))
    result = {
        "script": "benchmarks/cache_length.py",
        "ms_per_token": {str(n): round(1e3 * statistics.median(v), 2) for n, v in seconds.items()},
        "median_of_paired_ratio": round(ratio, 3),
    }
    print(json.dumps(result, indent=1))
    print(save("cache-length", result))


if __name__ == "__main__":
    main()
