"""What TensorRT-RTX plans of integer weights take: `python -m benchmarks.integer_plans` (no GPU, nothing is executed).

Bundles of int8 and int4 are compiled for every target: small models of each family, whose plans are kernels above all, and a
Llama of hidden 2,048 with segments of 1 and 2 layers. By how much the second plan is larger is what a layer
takes, without kernels: `weight_ratio` is that over its integers and scales. Adds to results/integer-plans.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.tensorrt.compile import compile_bundle
from vlmexport.exporter.tensorrt.options import PlanOptions
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.common.errors import VlmexportError

from benchmarks.machine import RESULTS, save
from tests.support import tiny_models

TINY = ("tiny-blip2-flant5", "tiny-vit-gpt2", "tiny-qwen2.5-vl")
RANDOM = ("llava", "llava-next", "blip2-opt", "qwen2", "t5")
LAYERS = (1, 2)
WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": sum(LAYERS),
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TARGETS = ("sm86", "sm89", "sm120")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="one of the models; repeatable")
    parser.add_argument("--kind", action="append", choices=["int8", "int4"])
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in options.model or ("wide", *TINY, *RANDOM):
        for kind in options.kind or ("int8", "int4"):
            with tempfile.TemporaryDirectory() as folder:
                bundle = built(model, kind, Path(folder))
                for target in options.target or TARGETS:
                    rows.append(compiled(bundle, model, kind, target))
                    print(line(rows[-1]), flush=True)
    file = RESULTS / "integer-plans.json"
    if file.exists():  # other models, of an earlier run
        new = {(row["model"], row["weights"], row["target"]) for row in rows}
        old = json.loads(file.read_text("utf-8"))["rows"]
        rows = [r for r in old if (r["model"], r["weights"], r["target"]) not in new] + rows
    result = {"script": "benchmarks/integer_plans.py", "rows": rows}
    if not options.no_save:
        print(save("integer-plans", result, "tensorrt-rtx-libs", "torch", "transformers"))


def built(model: str, kind: str, folder: Path) -> Path:
    """A bundle of `model` with the weights `kind`."""
    source = model
    if model == "wide":
        source = str(wide(folder / "model"))
    elif model in RANDOM:
        source = str(tiny_models.checkpoint(model, folder / "model"))
    output = folder / "bundle"
    layer = LAYERS[0] if model == "wide" else None
    build_bundle(
        BuildRequest(
            model=source, output=output, weights=kind, parity=False, precision="float16",
            drafts=[] if layer else ["none"], draft_layer=layer,
        )
    )  # fmt: skip
    return output


def wide(folder: Path) -> Path:
    """A checkpoint of a Llama of 4 random layers."""
    torch.manual_seed(0)
    tokenizer = tiny_models.llama_tokenizer()
    end = tiny_models.token_id(tokenizer, "<|im_end|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=1024, bos_token_id=end - 1, eos_token_id=end, pad_token_id=None, **WIDE
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def compiled(bundle: Path, model: str, kind: str, target: str) -> dict[str, Any]:
    """A row for the plans of a target; with the reason, where they were refused."""
    manifest = Bundle.open(bundle).manifest
    row: dict[str, Any] = {"model": model, "weights": kind, "target": target}
    try:
        report = compile_bundle(bundle, PlanOptions(target=target)).plans
    except VlmexportError as error:
        return {**row, "refused": str(error)}
    plans = {plan["graph"]: plan for plan in report.entries}
    integers = {name: graph.integers for name, graph in manifest.graphs.items() if graph.integers}
    row |= {
        "graphs": len(plans), "integer_graphs": sorted(integers), "integers": sum(integers.values()),
        "weight_bytes": sum(plans[name]["weight_bytes"] for name in integers), "bytes": sum(plans[name]["bytes"] for name in integers),
    }  # fmt: skip
    if model == "wide":
        short, long = (plans[name] for name in manifest.segments)
        more = long["weight_bytes"] - short["weight_bytes"]
        numbers = integers[manifest.segments[1]] - integers[manifest.segments[0]]
        row["weight_ratio"] = round((long["bytes"] - short["bytes"]) / more, 3)
        row["bytes_a_weight"] = round((long["bytes"] - short["bytes"]) / numbers, 3)
    return row


def line(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    start = f"| {row['model']} | {row['weights']} | {row['target']} |"
    if "refused" in row:
        return f"{start} refused: {row['refused']} |"
    return (
        f"{start} {row['graphs']} | {row['integers'] / 1e6:.1f} M | {row['weight_bytes'] / 1e6:.1f} MB | {row['bytes'] / 1e6:.1f} MB | "
        f"{row.get('weight_ratio', '')} | {row.get('bytes_a_weight', '')} |"
    )


if __name__ == "__main__":
    main()
