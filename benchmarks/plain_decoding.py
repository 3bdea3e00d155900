"""Plain greedy decoding of SmolLM2-135M, fp32: vlmexport against transformers and onnxruntime-genai.

One process per engine; per prompt and round the engines run one after the other in random order on the same token
ids, 128 new tokens, no EOS. Also checks that our tokens equal those of ``transformers.generate``.

    python -m benchmarks.smollm2 runs/smollm2
    vlmexport build --model runs/smollm2 --draft-layer 10 -o runs/smollm2-bundle
    python -m onnxruntime_genai.models.builder -i runs/smollm2 -o runs/smollm2-genai -p fp32 -e cpu
    python -m benchmarks.plain_decoding runs/smollm2 runs/smollm2-bundle --genai runs/smollm2-genai
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.machine import save
from benchmarks.workers import Worker
from tests.support.programs import program

THREADS = 2
TOPICS = [
    "Explain how a robot arm plans a grasp.", "Describe a red cube next to a blue ball on a wooden table.",
    "Write a short story about a lighthouse.", "List five uses for a paper clip.",
    "What is the capital of France, and why is it famous?", "How do I clean a camera lens?",
    "Explain photosynthesis to a child.", "Write a poem about autumn rain.",
    "Give step by step instructions to make tea.", "What is a Kalman filter?",
    "Summarise the plot of Romeo and Juliet.", "Why is the sky blue?",
    "Describe a typical day of a warehouse robot.", "Compare cats and dogs as pets.",
    "What should I check before a long bicycle ride?", "Explain recursion with an example.",
    "Write a polite reminder e-mail about an unpaid invoice.", "How does a refrigerator work?",
    "Name three famous scientists and what they found.", "Tell me about the history of chess.",
]  # fmt: skip


def prompts(model: str, count: int) -> list[list[int]]:
    """Token ids of ``count`` chat prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = (
        tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], tokenize=False, add_generation_prompt=True
        )
        for t in TOPICS[:count]
    )
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def serve(engine: str, path: str, new_tokens: int) -> None:
    """Worker: reads one JSON list of ids per line, answers tokens and decode seconds per token."""
    if engine == "vlmexport":
        from vlmexport.runtime import Session

        session = Session.load(path, threads=THREADS, max_length=512)

        def generate(ids: list[int]) -> tuple[list[int], float, float]:
            begin = time.perf_counter()
            result = session.generate_tokens(
                ids, max_new_tokens=new_tokens, speculative=False, ignore_eos=True
            )
            total = time.perf_counter() - begin
            first = result.stats.time_to_first_token
            return list(result.tokens), first, (total - first) / (new_tokens - 1)

    elif engine == "transformers":
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(THREADS)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None

        class Clock:
            def __init__(self) -> None:
                self.stamps: list[float] = []

            def put(self, value: object) -> None:
                self.stamps.append(time.perf_counter())

            def end(self) -> None:
                pass

        @torch.inference_mode()
        def generate(ids: list[int]) -> tuple[list[int], float, float]:
            clock, begin = Clock(), time.perf_counter()
            out = model.generate(
                torch.tensor([ids]),
                max_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
                pad_token_id=0,
            )
            stamps = clock.stamps[1:]  # the first call hands over the prompt
            return (
                out[0, len(ids) :].tolist(),
                stamps[0] - begin,
                (stamps[-1] - stamps[0]) / (len(stamps) - 1),
            )

    else:
        import onnxruntime_genai as genai

        model = genai.Model(path)

        def generate(ids: list[int]) -> tuple[list[int], float, float]:
            options = genai.GeneratorParams(model)
            options.set_search_options(
                max_length=len(ids) + new_tokens, min_length=len(ids) + new_tokens, do_sample=False
            )
            begin = time.perf_counter()
            generator = genai.Generator(model, options)
            generator.append_tokens(ids)
            generator.generate_next_token()
            first = time.perf_counter()
            tokens = [int(generator.get_next_tokens()[0])]
            while len(tokens) < new_tokens:
                generator.generate_next_token()
                tokens.append(int(generator.get_next_tokens()[0]))
            end = time.perf_counter()
            return tokens, first - begin, (end - first) / (new_tokens - 1)

    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(generate(json.loads(line))), flush=True)


def start(engine: str, path: str, new_tokens: int) -> Worker:
    """One engine in a process of its own; asked for token ids, it answers (tokens, seconds to the first, per token)."""
    return Worker(program("benchmarks.plain_decoding", "--serve", engine, path, new_tokens))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("bundle")
    parser.add_argument("--genai", help="folder written by onnxruntime_genai.models.builder")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--timed", type=int, default=4, help="prompts that are timed in rounds")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    paths = {"transformers": options.model, "vlmexport": options.bundle}
    if options.genai:
        paths["onnxruntime-genai"] = options.genai
    workers = {name: start(name, path, options.new_tokens) for name, path in paths.items()}
    all_ids = prompts(options.model, options.prompts)
    equal = 0
    for ids in all_ids:
        ours, theirs = workers["vlmexport"].ask(ids)[0], workers["transformers"].ask(ids)[0]
        equal += ours == theirs
    times: dict[str, list[float]] = {name: [] for name in workers}
    first: dict[str, list[float]] = {name: [] for name in workers}
    order, shuffle = list(workers), random.Random(0)
    for name in order:  # warm-up
        workers[name].ask(all_ids[0])
    for _ in range(options.rounds):
        for ids in all_ids[: options.timed]:
            shuffle.shuffle(order)
            for name in order:
                _, ttft, per_token = workers[name].ask(ids)
                times[name].append(per_token)
                first[name].append(ttft)
    base = statistics.median(times["transformers"])
    rows = {
        name: {
            "ms_per_token": round(1e3 * statistics.median(v), 2),
            "ms_min": round(1e3 * min(v), 2),
            "ms_max": round(1e3 * max(v), 2),
            "speedup_over_transformers": round(base / statistics.median(v), 2),
            "median_of_paired_ratio_to_vlmexport": round(
                statistics.median(a / b for a, b in zip(v, times["vlmexport"], strict=True)), 3
            ),
            "first_token_ms": round(1e3 * statistics.median(first[name]), 1),
        }
        for name, v in times.items()
    }
    result = {
        "script": "benchmarks/plain_decoding.py",
        "model": "SmolLM2-135M-Instruct, fp32",
        "threads": THREADS,
        "new_tokens": options.new_tokens,
        "samples": len(times["vlmexport"]),
        "equal_to_transformers": f"{equal}/{len(all_ids)} prompts x {options.new_tokens} tokens",
        "engines": rows,
    }
    print(json.dumps(result, indent=1))
    print(save("plain-decoding-smollm2", result, "torch", "transformers", "onnxruntime-genai"))


if __name__ == "__main__":
    main()
