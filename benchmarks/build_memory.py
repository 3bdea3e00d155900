"""Peak memory of a build against what its dry run said, whole and layer by layer.

    python -m benchmarks.build_memory [--case NAME …] [--folder DIR]

Each case is a random float16 checkpoint of a Llama; it is made, planned with `--dry-run` and built in processes of
their own. Cases that are not asked for keep their rows. The peak is VmHWM of the process that builds; anonymous and file pages are sampled. Needs about 7 GB of
disk and, for the case that compares whole, 6 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import save, stored
from tests.support.programs import program

LIMIT = 0.10
"""How far the estimate may be from the peak."""

WIDE = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 32}
NARROW = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 9, "num_attention_heads": 16}
SHORT = NARROW | {"num_hidden_layers": 8}
INT4 = ("--weights", "int4")

CASES: dict[str, dict[str, Any]] = {
    "0.6 B, 5 shards, whole": {"config": NARROW, "shard": "300MB", "options": ["--parity-memory", "100GiB"]},
    "0.6 B, 5 shards, layer by layer": {
        "config": NARROW,
        "shard": "300MB",
        "options": ["--parity-memory", "0"],
    },
    "0.6 B, 5 shards, whole, bundle of float16": {
        "config": NARROW,
        "shard": "300MB",
        "options": ["--parity-memory", "100GiB", "--precision", "fp16"],
    },
    "layers of a 7 B, 1 shard, layer by layer": {
        "config": WIDE,
        "shard": "5GB",
        "options": ["--parity-memory", "0"],
    },
    "0.5 B to int4, whole": {
        "config": SHORT,
        "shard": "5GB",
        "options": [*INT4, "--parity-memory", "100GiB"],
    },
    "0.5 B to int4, layer by layer": {
        "config": SHORT,
        "shard": "5GB",
        "options": [*INT4, "--parity-memory", "100MB"],
    },
    "0.5 B of GPTQ, whole": {
        "config": SHORT,
        "shard": "5GB",
        "form": "gptq",
        "options": ["--parity-memory", "100GiB"],
    },
    "0.5 B of GPTQ, layer by layer": {
        "config": SHORT,
        "shard": "5GB",
        "form": "gptq",
        "options": ["--parity-memory", "100MB"],
    },
    "0.5 B of compressed-tensors, whole": {
        "config": SHORT,
        "shard": "5GB",
        "form": "w4a16",
        "options": ["--parity-memory", "100GiB"],
    },
}


def make(folder: str, shard: str, config: str) -> None:
    """Worker: writes a random checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.support import tiny_models

    tokenizer = tiny_models.llama_tokenizer()
    end = tiny_models.token_id(tokenizer, "<|im_end|>")
    torch.set_default_dtype(torch.float16)
    options = json.loads(config)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32064, num_key_value_heads=options["num_attention_heads"], max_position_embeddings=2048,
            tie_word_embeddings=False, bos_token_id=end - 1, eos_token_id=end, pad_token_id=None, **options,
        )
    )  # fmt: skip
    for value in model.parameters():
        if value.ndim > 1:
            value.data.uniform_(-0.03, 0.03)
    model.save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)


def resident(bundle: str) -> dict[str, int]:
    """Worker: resident bytes of a session after three requests, the most of them long."""
    from vlmexport.runtime import Session

    session = Session.load(bundle)
    for prompt in ("a", "the red ball", "a b c " * 40):
        session.generate(prompt=prompt, max_new_tokens=16)
    status = Path("/proc/self/status").read_text()
    return {"resident": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024}  # type: ignore[index]


def command(*arguments: object) -> list[str]:
    """`vlmexport …` in a fresh Python."""
    return [sys.executable, "-m", "vlmexport.runtime.cli", *map(str, arguments)]


def watched(line: list[str], output: Path = Path(os.devnull)) -> dict[str, float]:
    """Runs a command to its end, what it prints into `output`; the largest values that /proc showed, in MB."""
    with output.open("w") as file:
        process = subprocess.Popen(line, stdout=file)
    peak: dict[str, float] = {}
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            break
        for name in ("VmHWM", "RssAnon", "RssFile"):
            match = re.search(rf"{name}:\s+(\d+)", status)
            if match:
                peak[name] = max(peak.get(name, 0.0), int(match[1]) * 1024 / 1e6)
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"{' '.join(line)} failed with status {process.returncode}")
    return peak


def measure(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One case: estimate and peak."""
    model, output = folder / "model", folder / "bundle"
    subprocess.run(
        program("benchmarks.build_memory", "--make", model, case["shard"], json.dumps(case["config"])),
        check=True,
    )
    if "form" in case:
        subprocess.run(
            program("benchmarks.build_memory", "--quantize", model, folder / "quantized", case["form"]),
            check=True,
        )
        model = folder / "quantized"
    asked = ["build", "--model", model, "--draft-layer", "1", "-o", output, *case["options"], "--json"]
    plan = json.loads(
        subprocess.run(command(*asked, "--dry-run"), check=True, capture_output=True, text=True).stdout
    )
    peak = watched(command(*asked))
    estimate = plan["peak_memory"]["build"] / 1e6
    ran = subprocess.run(
        program("benchmarks.build_memory", "--run", output), check=True, capture_output=True, text=True
    )
    run, running = plan["peak_memory"]["run"] / 1e6, json.loads(ran.stdout)["resident"] / 1e6
    return {
        "parameters_m": round(plan["parameters"] / 1e6, 1),
        "parity": plan["parity"],
        "estimate_mb": round(estimate),
        "peak_mb": round(peak["VmHWM"]),
        "peak_anonymous_mb": round(peak["RssAnon"]),
        "peak_file_mb": round(peak["RssFile"]),
        "peak_over_estimate": round(peak["VmHWM"] / estimate, 3),
        "within_limit": abs(peak["VmHWM"] / estimate - 1) <= LIMIT,
        "file_mb": round((output / "weights.bin").stat().st_size / 1e6, 1),
        "planned_file_mb": round(plan["weight_bytes"] / 1e6, 1),
        "run_estimate_mb": round(run),
        "run_mb": round(running),
        "run_over_estimate": round(running / run, 3),
    }


def main() -> None:
    if sys.argv[1:2] == ["--make"]:
        make(*sys.argv[2:5])
        return
    if sys.argv[1:2] == ["--quantize"]:
        from tests.support.quantized_checkpoints import write_quantized

        write_quantized(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
        return
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(resident(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeatable; all by default")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where models go for a while"
    )
    parser.add_argument("--no-save", action="store_true", help="print only")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = stored("build-memory", "cases")
    for name in arguments.case or CASES:
        folder = Path(tempfile.mkdtemp(prefix="build-memory-", dir=arguments.folder))
        try:
            rows[name] = measure(CASES[name], folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(name, json.dumps(rows[name]), flush=True)
    if not arguments.no_save:
        result = {"script": "benchmarks/build_memory.py", "limit": LIMIT, "cases": rows}
        print(save("build-memory", result, "torch", "transformers"))


if __name__ == "__main__":
    main()
