"""Answers per second of `vlmexport generate-data`: the runtime against PyTorch's `generate`, side by side.

One process per engine, each as the command runs it; in every round each answers the same records, one after the other
in random order. Wall time and processor time (of all threads, and of the processes that an engine starts) are measured;
loading and the one export are not.

    python -m benchmarks.generate_data tiny-blip2-flant5
    python -m benchmarks.generate_data runs/smollm2 --data prompts.jsonl --name smollm2 --records 64 --rounds 2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import time
from typing import Any

import psutil

from benchmarks.machine import save
from benchmarks.workers import Worker
from tests.support.programs import program

ENGINES = {
    "torch": {"engine": "torch", "threads": None},
    "torch, 1 thread": {"engine": "torch", "threads": 1},
    "runtime": {"engine": "runtime", "threads": None},
}


def cpu_seconds() -> float:
    """Processor time of this process and its children, all threads. Those that run count as those that have ended."""
    ended = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    running = [child.cpu_times() for child in psutil.Process().children()]
    return sum(used.ru_utime + used.ru_stime for used in ended) + sum(t.user + t.system for t in running)


def serve(name: str, options: argparse.Namespace) -> None:
    """Worker: for every line read, answers all records; writes seconds, processor seconds and the answers."""
    import torch
    from vlmexport.calibration.data import load_records
    from vlmexport.calibration.generation.answers import GenerationOptions
    from vlmexport.calibration.generation.engine import open_answers

    wanted = ENGINES[name]
    if wanted["threads"]:
        torch.set_num_threads(wanted["threads"])
    records = list(load_records(options.data, limit=options.records))
    limits = GenerationOptions(options.max_new_tokens, options.temperature)
    answers = open_answers(
        options.model, wanted["engine"], "cpu", None, options.max_new_tokens, options.batch_size, None,
        lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = records[: json.loads(line)]
        begin, cpu = time.perf_counter(), cpu_seconds()
        by_request: dict[int, Any] = dict(answers.answer(asked, limits))
        spent = time.perf_counter() - begin, cpu_seconds() - cpu
        print(json.dumps([*spent, [by_request[i][0] for i in range(len(asked))]]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="tiny-blip2-flant5")
    parser.add_argument("--data", default="scenes:train:256")
    parser.add_argument("--name", default="tiny-blip2-flant5", help="of the file of results")
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="repeatable; default: all")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options)
        return
    workers = {
        name: Worker(program("benchmarks.generate_data", *sys.argv[1:], "--serve", name))
        for name in options.engine or ENGINES
    }
    for worker in workers.values():  # warm-up, with as many processes as the rounds use
        worker.ask(options.records)
    rates: dict[str, list[float]] = {name: [] for name in workers}
    cpu: dict[str, list[float]] = {name: [] for name in workers}
    said: dict[str, list[list[int]]] = {}
    order, shuffle = list(workers), random.Random(0)
    for _ in range(options.rounds):
        shuffle.shuffle(order)
        for name in order:
            seconds, processor, said[name] = workers[name].ask(options.records)
            rates[name].append(len(said[name]) / seconds)
            cpu[name].append(1e3 * processor / len(said[name]))
    ours = rates["runtime"]
    rows = {
        name: {
            "answers_per_second": round(statistics.median(rates[name]), 2),
            "lowest": round(min(rates[name]), 2),
            "highest": round(max(rates[name]), 2),
            "cpu_ms_per_answer": round(statistics.median(cpu[name]), 2),
            "runtime_is_faster_by": round(
                statistics.median(a / b for a, b in zip(ours, rates[name], strict=True)), 2
            ),
            "runtime_needs_less_cpu_by": round(
                statistics.median(b / a for a, b in zip(cpu["runtime"], cpu[name], strict=True)), 2
            ),
            "answers_equal_to_runtime": sum(a == b for a, b in zip(said[name], said["runtime"], strict=True)),
        }
        for name in workers
    }
    for name, row in rows.items():
        print(
            f"{name:16} {row['answers_per_second']:8.2f} answers/s [{row['lowest']} – {row['highest']}]  "
            f"{row['cpu_ms_per_answer']:8.1f} ms of processor time per answer; runtime: "
            f"{row['runtime_is_faster_by']:.2f} x the rate, {row['runtime_needs_less_cpu_by']:.2f} x less processor "
            f"time, {row['answers_equal_to_runtime']}/{options.records} answers equal"
        )
    result = {
        "script": "benchmarks/generate_data.py",
        "model": options.name,
        "data": options.data,
        "records": options.records,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "rounds": options.rounds,
        "tokens": sum(map(len, said["runtime"])),
        "load_average": os.getloadavg()[0],
        "engines": rows,
    }
    print(save(f"generate-data-{options.name}", result, "torch", "transformers"))


if __name__ == "__main__":
    main()
