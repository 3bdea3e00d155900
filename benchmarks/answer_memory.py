"""Decoding with a memory of earlier answers: a camera that is asked the same question again.

    vlmexport build --model tiny-blip2-flant5 -o runs/blip2
    python -m benchmarks.answer_memory runs/blip2 [--chat runs/smollm2-bundle]

Kinds of pictures, of the bundled world: `static`, one scene with sensor noise; `films`, with an event in about every third
frame and noise; `unrelated`, another scene each time; and `chat`, open questions to a bundle of text. Every arm answers each
picture, one after the other in random order, with a memory of its own, which begins empty with every scene or film; the
first answer of each is left out. `by_cost_table` takes every pass to be as long as the bundle's table says. The draft length is the controller's. Ratios are of decode seconds (without prompt and
picture) over all answers of a scene or film; the figure is their median with a bootstrapped 95 % interval.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vlmexport.calibration.data.scenes.dataset import film_pictures
from vlmexport.runtime import Memory, Session
from vlmexport.runtime.bundle.stored_costs import pick_costs, with_drafts_of_requests
from vlmexport.runtime.hardware.machine import processor
from vlmexport.runtime.measure.virtual_clock import decoding
from vlmexport.runtime.speedup.stats import Stats

from benchmarks.intervals import shown, with_interval
from benchmarks.machine import save

WORLD, SIDE, NOISE = 2, 96, 4.0
"""The seed of the bundled world's films, pixels a side, and the standard deviation of sensor noise of 255."""
FEWER = 6
"""Open questions are so many times fewer than pictures: their answers are long."""
PLAIN = "plain"
THREADS = 2


def noisy(picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """uint8 [H, W, 3] as another exposure would be."""
    return (picture + generator.normal(0, NOISE, picture.shape)).clip(0, 255).astype(np.uint8)


def static(number: int, count: int) -> list[np.ndarray]:
    """`count` exposures of one scene."""
    picture, generator = film_pictures(WORLD, number, SIDE)[0], np.random.default_rng(number)
    return [noisy(picture, generator) for _ in range(count)]


def film(number: int, count: int) -> list[np.ndarray]:
    """The frames of one film, one after the other and back, so that events come and go."""
    frames, generator = film_pictures(WORLD, number, SIDE), np.random.default_rng(number)
    order = [*range(len(frames)), *range(len(frames) - 2, 0, -1)]
    return [noisy(frames[order[at % len(order)]], generator) for at in range(count)]


def unrelated(number: int, count: int) -> list[np.ndarray]:
    """`count` scenes."""
    return [film_pictures(WORLD, number * count + at, SIDE)[0] for at in range(count)]


KINDS: dict[str, Callable[[int, int], list[np.ndarray]]] = {
    "static": static,
    "films": film,
    "unrelated": unrelated,
}


def arms_of(session: Session) -> dict[str, dict[str, Any]]:
    """Name → options of a request; a draft of `memory` gets one."""
    own = [draft.name for draft in session.bundle.manifest.drafts if draft.layer is None]
    arms: dict[str, dict[str, Any]] = {PLAIN: {"draft": "none"}}
    for name in own:
        arms[name] = {"draft": name}
    for name in ("memory", *(f"memory+{name}" for name in own)):
        arms[name] = {"draft": name}
    return arms


def compare(
    session: Session, series: Iterable[list[dict[str, Any]]], new_tokens: int, rounds: int
) -> dict[str, Any]:
    """Each arm over all series of requests: ratio to plain decoding, and tokens a pass."""
    arms, shuffle = arms_of(session), random.Random(0)
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    counted: dict[str, list[Stats]] = {name: [] for name in arms}
    changed = answers = repeated = 0
    manifest = session.bundle.manifest
    table = with_drafts_of_requests(pick_costs(manifest, processor(), THREADS), manifest.drafts)
    for requests in series:
        seconds = dict.fromkeys(arms, 0.0)
        for _ in range(rounds):
            memories = {name: Memory() for name in arms}
            before: list[int] = []
            for place, request in enumerate(requests):
                order, found = list(arms), {}
                shuffle.shuffle(order)
                for name in order:
                    more: dict[str, Any] = {"memory": memories[name]} if name.startswith("memory") else {}
                    found[name] = session.generate(**request, **arms[name], **more, max_new_tokens=new_tokens)
                changed += any(result.tokens != found[PLAIN].tokens for result in found.values())
                if place:
                    answers += 1
                    repeated += found[PLAIN].tokens == before
                    for name, result in found.items():
                        seconds[name] += result.stats.decode_seconds
                        counted[name].append(result.stats)
                before = found[PLAIN].tokens
        for name in arms if seconds[PLAIN] else ():  # a single request has no answer before it
            ratios[name].append(seconds[PLAIN] / seconds[name])
    return {
        "answers": answers,
        "same_as_before": round(repeated / answers, 3),
        "answers_with_a_changed_token": changed,
        "arms": {
            name: {
                "times_plain": with_interval(values),
                "by_cost_table": round(decoding(table, name, Stats.total(counted[name])).speedup, 3),
                "tokens_per_pass": round(Stats.total(counted[name]).tau, 2),
            }
            for name, values in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle")
    parser.add_argument("--chat", metavar="DIR", help="a bundle of text, for open questions")
    parser.add_argument(
        "--kind", action="append", choices=[*KINDS, "chat"], help="repeatable; all by default"
    )
    parser.add_argument("--series", type=int, default=12, help="scenes or films of a kind")
    parser.add_argument("--length", type=int, default=9, help="pictures of each")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    kinds = options.kind or [*KINDS, *(["chat"] if options.chat else [])]
    rows: dict[str, Any] = {}
    for kind in kinds:
        path = options.chat if kind == "chat" else options.bundle
        with Session.load(path, threads=THREADS, max_length=512) as session:
            session.generate(**next(iter(requests_of(kind, 1, 1)))[0], max_new_tokens=8)  # warm-up
            series = requests_of(kind, options.series, options.length)
            rows[kind] = compare(session, series, options.new_tokens, options.rounds)
        for name, row in rows[kind]["arms"].items():
            print(
                f"{kind:10} {name:24} {shown(row['times_plain'], '.2f')} ×, by table {row['by_cost_table']}, tau {row['tokens_per_pass']}",
                flush=True,
            )
        print({key: value for key, value in rows[kind].items() if key != "arms"}, flush=True)
    if not options.no_save:
        result = {"script": "benchmarks/answer_memory.py", "threads": THREADS, "kinds": rows}
        print(save("answer-memory", result, "onnxruntime"))


def requests_of(kind: str, series: int, length: int) -> list[list[dict[str, Any]]]:
    """Series of requests, what they are about by name."""
    if kind == "chat":
        from benchmarks.prompt_lookup import chat

        texts = chat(max(series, series * length // FEWER))
        return [[{"prompt": text} for text in texts[at::series]] for at in range(series)]
    return [[{"image": picture} for picture in KINDS[kind](20 + number, length)] for number in range(series)]


if __name__ == "__main__":
    main()
