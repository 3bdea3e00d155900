"""A control loop that asks the model what is on the table, with a time limit for each answer.

    python examples/control_loop.py demo/bundle demo/scene.png --period 0.2

A request with a deadline ends between two decoding cycles with finish_reason "deadline" and the text it has so far.
Answers are remembered ("camera"), and how they went on is proposed in the next tick.
The image and the prompt are always processed, so a period shorter than that (`vlmexport bench`: first token) is missed.
"""

from __future__ import annotations

import argparse
import sys
import time

from vlmexport.runtime import Session, VlmexportError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("image")
    parser.add_argument("--period", type=float, default=0.2, help="seconds per tick")
    parser.add_argument("--ticks", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu; on a GPU cuda or tensorrt")
    options = parser.parse_args()
    with Session.load(options.bundle, options.device) as session:
        session.generate(image=options.image, max_new_tokens=8)  # warm-up: the first request allocates
        for tick in range(options.ticks):
            begin = time.monotonic()
            result = session.generate(
                image=options.image, max_new_tokens=96, deadline=0.8 * options.period, memory="camera"
            )
            spent = time.monotonic() - begin
            print(f"tick {tick}: {1e3 * spent:5.1f} ms, {result.finish_reason:8s} {result.text}")
            if tick + 1 < options.ticks:
                time.sleep(max(0.0, options.period - spent))


if __name__ == "__main__":
    try:
        main()
    except VlmexportError as error:  # one line that names the cause
        sys.exit(str(error))
