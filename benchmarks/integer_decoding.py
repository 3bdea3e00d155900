"""SmolLM2-135M with integer weights: plain decoding beside its float32 bundle and onnxruntime-genai, and prompt lookup.

Every bundle and every engine is a process of its own; per prompt and round all arms run one after the other in random
order on the same token ids, 96 new tokens, no EOS. Prompts are questions (`chat`), and texts that repeat themselves
(`copying`). Ratios are medians of pairs within a round; `tau` is tokens per cycle.

    python -m benchmarks.smollm2 runs/smollm2
    for w in float int8 int4; do vlmexport build --model runs/smollm2 --weights $w --draft prompt-lookup -o runs/$w; done
    python -m onnxruntime_genai.models.builder -i runs/smollm2 -o runs/genai-int4 -p int4 -e cpu \\
        --extra_options block_size=32 accuracy_level=4 algo_config=rtn_last
    python -m benchmarks.integer_decoding runs/smollm2 --bundle float32=runs/float --bundle int4=runs/int4 \\
        --genai int4=runs/genai-int4
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.machine import save
from benchmarks.plain_decoding import THREADS, prompts, start
from benchmarks.workers import Worker
from tests.support.programs import program

COPIED = (
    "The robot picked up the small red cup, put it on the upper shelf, turned around and drove back to the charging station "
    "near the window. There it waited for two minutes, checked its battery, and left again to look for the blue box that "
    "somebody had put behind the door of the kitchen.",
    "one red cup on the left, two green bowls in the middle, three blue boxes on the right, a yellow ball behind the boxes, "
    "four white plates below the table, a black pen beside the lamp, five brown books under the window, and a grey cat on "
    "the chair.",
    '{"objects": [{"name": "cup", "colour": "red", "x": 12, "y": 40}, {"name": "bowl", "colour": "green", "x": 57, "y": 41}, '
    '{"name": "box", "colour": "blue", "x": 88, "y": 39}, {"name": "ball", "colour": "yellow", "x": 91, "y": 22}]}',
)
DRAFT = "prompt-lookup"


def copying(model: str) -> list[list[int]]:
    """Token ids of texts that stand twice and begin once more: a model this small copies these, and seldom what it is asked
    to copy."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"{text}\n\n{text}\n\n{' '.join(text.split()[:4])}" for text in COPIED]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def serve(path: str, new_tokens: int) -> None:
    """Worker: reads [token ids, draft] a line, answers tokens, seconds per token and tokens per cycle."""
    from vlmexport.runtime import Session

    session = Session.load(path, threads=THREADS, max_length=512)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        ids, draft = json.loads(line)
        result = session.generate_tokens(ids, max_new_tokens=new_tokens, ignore_eos=True, draft=draft)
        stats, speed = result.stats, result.stats.tokens_per_second
        assert speed is not None, "an answer of one token has no speed"
        print(json.dumps([list(result.tokens), 1 / speed, stats.tau]), flush=True)


def named(value: str) -> tuple[str, str]:
    """NAME=DIR."""
    name, equals, path = value.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME=DIR")
    return name, path


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--bundle", type=named, action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--genai", type=named, action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=96)
    options = parser.parse_args()
    arms: dict[str, Callable[[list[int]], tuple[list[int], float, float]]] = {}
    for name, path in options.bundle:
        bundle = Worker(program("benchmarks.integer_decoding", "--serve", path, options.new_tokens))
        for draft in ("none", DRAFT):
            arm = name if draft == "none" else f"{name} + {draft}"
            arms[arm] = lambda ids, bundle=bundle, draft=draft: bundle.ask([ids, draft])
    for name, path in options.genai:
        worker = start("onnxruntime-genai", path, options.new_tokens)
        arms[f"onnxruntime-genai {name}"] = lambda ids, worker=worker: (
            (answer := worker.ask(ids))[0],
            answer[2],
            1.0,
        )
    sets = {"chat": prompts(options.model, options.prompts), "copying": copying(options.model)}
    result: dict[str, Any] = {
        "script": "benchmarks/integer_decoding.py",
        "model": "SmolLM2-135M-Instruct",
        "threads": THREADS,
        "new_tokens": options.new_tokens,
        "rounds": options.rounds,
    }
    for kind, all_ids in sets.items():
        times: dict[str, list[float]] = {name: [] for name in arms}
        texts: dict[tuple[str, int], list[int]] = {}
        taus: dict[tuple[str, int], float] = {}
        order, shuffle = list(arms), random.Random(0)
        for name in order:  # warm-up
            arms[name](all_ids[0])
        for _ in range(options.rounds):
            for number, ids in enumerate(all_ids):
                shuffle.shuffle(order)
                for name in order:
                    texts[name, number], seconds, taus[name, number] = arms[name](ids)
                    times[name].append(seconds)
        result[kind] = {
            name: {
                "ms_per_token": round(1e3 * statistics.median(values), 2),
                "tau": round(statistics.mean(taus[name, number] for number in range(len(all_ids))), 2),
                "times_as_fast_as": {
                    other: round(
                        statistics.median(b / a for a, b in zip(values, times[other], strict=True)), 3
                    )
                    for other in arms
                    if other != name
                },
            }
            for name, values in times.items()
        }
        result[f"{kind}: drafted and plain tokens equal"] = all(
            texts[name, number] == texts[f"{name} + {DRAFT}", number]
            for name, _ in options.bundle
            for number in range(len(all_ids))
        )
    print(json.dumps(result, indent=1))
    print(save("integer-decoding-smollm2", result, "onnxruntime", "onnxruntime-genai"))


if __name__ == "__main__":
    main()
