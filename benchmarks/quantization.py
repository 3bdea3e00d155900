"""What integer weights cost, by kind and method: KL to the float model, best tokens, perplexity, facts.

    python -m benchmarks.smollm2 runs/smollm2
    python -m benchmarks.quantization --smollm2 runs/smollm2
    python -m benchmarks.quantization --models tiny-blip2-flant5 --scenes 256

The bundled models read scenes: the first of the training's calibrate, the first held-out ones measure, and captions of as many
are scored by their facts. SmolLM2 reads this project's docs in rows of 256 tokens, other files to calibrate than to measure. Its
weights come from a file of 4-bit blocks, so that its figures at 4 bits are those of weights that were rounded before; its tied head stays
float. CPU seconds are those of choosing integers, the passes of the model included. Writes results/quantization.json; models that are not
asked for keep their rows there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vlmexport.calibration.data import RecordSet, load_records
from vlmexport.calibration.data.reading.records import Record
from vlmexport.calibration.quantization.facts import facts_of
from vlmexport.calibration.quantization.layerwise import quantize_layers
from vlmexport.calibration.quantization.matrices import head_matrix, stacks
from vlmexport.calibration.quantization.quality import FloatReference
from vlmexport.calibration.targets.target import Target, load_target
from vlmexport.exporter.quantization.choice import parse_weights

from benchmarks.machine import save, stored

TINY = ("tiny-blip2-flant5", "tiny-qwen2.5-vl", "tiny-vit-gpt2")
BARE = ("tiny-vit-gpt2",)
"""Captioners, which read no prompt."""
VARIANTS = {
    "int8 rounding": ("int8", "rounding"),
    "int8 gptq": ("int8", "gptq"),
    "int4 rounding": ("int4", "rounding"),
    "int4 gptq": ("int4", "gptq"),
}
NAME = "quantization"
ROW = 256
"""Tokens of a row of docs."""
ASKED = "Write a page of documentation."
DOCS = Path(__file__).resolve().parent.parent / "docs"
HELD_OUT = ("how-to/training.md", "how-to/data.md", "explanation/reliability.md", "how-to/train-eagle.md")
CALIBRATION = (
    "how-to/run.md",
    "contributing/rooms-and-rules.md",
    "how-to/tensorrt.md",
    "reference/models.md",
    "how-to/robot.md",
    "explanation/cycle.md",
    "explanation/acceptance.md",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=TINY)
    parser.add_argument("--smollm2", help="a folder of benchmarks.smollm2")
    parser.add_argument(
        "--scenes", type=int, default=512, help="held-out scenes; a quarter of them measures KL"
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="of docs, to calibrate SmolLM2")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = stored(NAME, "models")
    for model in options.models:
        target = load_target(model)
        form = "scenes-captions" if model in BARE else "scenes"
        captioned = load_records(f"{form}:heldout:{options.scenes}")
        held = load_records(f"{form}:heldout:{max(1, options.scenes // 4)}")
        read = load_records(f"{form}:train:{options.samples}")
        rows[model] = compared(target, read, held, captioned)
        save(NAME, {"models": rows}, "torch", "transformers")
    if options.smollm2:
        target = load_target(options.smollm2)
        rows["smollm2-135m"] = compared(
            target, documents(target, CALIBRATION, options.rows), documents(target, HELD_OUT, 8), None
        )
        save(NAME, {"models": rows}, "torch", "transformers")


def compared(target: Target, read: RecordSet, held: RecordSet, captioned: RecordSet | None) -> dict[str, Any]:
    """The figures of the float model and of each variant, on the same records."""
    reference = FloatReference(target, held, head_changes=head_matrix(target) is not None)
    result: dict[str, Any] = {
        "calibration": {"data": read.name, "count": len(read)},
        "held_out": {"data": held.name, "count": len(held), "tokens": reference.quality.tokens},
        "captions": 0 if captioned is None else len(captioned),
        "float": {"perplexity": round(reference.quality.perplexity, 4), "facts": _facts(target, captioned)},
    }
    print(target.name, "float", result["float"], flush=True)
    for name, (weights, method) in VARIANTS.items():
        restore(target)
        begin = time.process_time()
        quantized = quantize_layers(target, parse_weights(weights), read.records, method)
        seconds = time.process_time() - begin
        quality = reference.measure()
        result[name] = {
            "kl": round(quality.kl, 6),
            "agreement": round(quality.agreement, 5),
            "perplexity": round(quality.perplexity, 4),
            "facts": _facts(target, captioned),
            "cpu_seconds": round(seconds, 1),
            "million_numbers_per_core_second": round(quantized.numbers / quantized.cpu_seconds / 1e6, 1),
        }
        print(target.name, name, result[name], flush=True)
    kl = {name: result[name]["kl"] for name in VARIANTS}
    result["gptq_kl_below_rounding"] = round(1 - kl["int4 gptq"] / kl["int4 rounding"], 4)
    return result


def restore(target: Target) -> None:
    """Gives every matrix the checkpoint's numbers again."""
    head = head_matrix(target)
    matrices = [m for stack in stacks(target) for layer in stack.matrices for m in layer]
    for matrix in [*matrices, *([] if head is None else [head])]:
        matrix.write(matrix.original(target))


def documents(target: Target, files: Sequence[str], rows: int) -> RecordSet:
    """Rows of prose of this project's docs."""
    ids = target.tokenizer(prose(files), add_special_tokens=False)["input_ids"]
    full = min(rows, len(ids) // ROW)
    records = [Record(str(i), ASKED, tokens=tuple(ids[i * ROW : (i + 1) * ROW])) for i in range(full)]
    return RecordSet(" ".join(files), records)


def prose(files: Sequence[str]) -> str:
    """This project's docs without tables and code fences."""
    text = "\n\n".join((DOCS / file).read_text("utf-8") for file in files)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|") and "```" not in line)


def _facts(target: Target, records: RecordSet | None) -> float | None:
    share = None if records is None else facts_of(target, records)
    return None if share is None else round(share, 5)


if __name__ == "__main__":
    main()
