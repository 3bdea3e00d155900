"""What TensorRT-RTX plans take beside their weights: `python -m benchmarks.plan_bytes` (a minute; no GPU, nothing is executed).

Decoder layers of a Llama (hidden 1,024, feed-forward 4,096, 16 heads of 64 over 4, float16: 30.4 MB each) with random weights, in
segments of 2 and 4 layers, built for each profile alone, for all of them, and for all with prefill fixed at one sequence,
which keeps the weights twice (`LEAST_BATCH` in exporter/tensorrt/profiles.py). Writes results/plan-bytes.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.exporter.tensorrt.builder import build_plan
from vlmexport.exporter.tensorrt.graph_copy import CopyOptions
from vlmexport.exporter.tensorrt.options import PlanOptions, resolve
from vlmexport.exporter.tensorrt.profiles import Profile, Sizes, profiles_for
from vlmexport.runtime.bundle.folder import Bundle
from vlmexport.runtime.graphs.registry import reads_prompts

from benchmarks.machine import save

LAYERS = (2, 4)
BACKEND = "tensorrt-rtx"
WORDS = Path(__file__).parent.parent / "models" / "vlmexport_tiny_models" / "tiny-qwen2.5-vl"
"""Of any tokenizer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="sm86")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = built(Path(folder))
        for lowering in ("native", "portable"):
            for row in measured(bundle, options.target, lowering, Path(folder)):
                rows.append(row)
                print(line(row), flush=True)
    result = {"script": "benchmarks/plan_bytes.py", "target": options.target, "rows": rows}
    if not options.no_save:
        print(save("plan-bytes", result, "tensorrt-rtx-libs", "torch", "transformers"))


def built(folder: Path) -> Bundle:
    """A bundle of a Llama whose segments have `LAYERS` layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=sum(LAYERS), num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=1024,
    )  # fmt: skip
    LlamaForCausalLM(config).half().save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(WORDS).save_pretrained(folder / "model")
    build_bundle(
        BuildRequest(
            model=str(folder / "model"), output=folder / "bundle", draft_layer=LAYERS[0],
            precision="float16", parity=False,
        )
    )  # fmt: skip
    return Bundle.open(folder / "bundle")


def measured(bundle: Bundle, target: str, lowering: str, scratch: Path) -> Iterator[dict[str, Any]]:
    """Bytes of the plans of every segment."""
    manifest = bundle.manifest
    wanted = resolve(
        PlanOptions(target=target, precision="fp16", lowering=lowering),
        manifest.model.decoder,
        manifest.weights_dtype,
    )
    sizes = Sizes.of_manifest(manifest, BACKEND)
    longest = sizes.max_length + sizes.max_width
    copied = CopyOptions("float16", longest, source=manifest.weights_dtype, lowering=lowering)
    for graph in map(manifest.graphs.__getitem__, manifest.segments):
        whole = profiles_for("segment", sizes, reads_prompts(graph))
        fixed = [one if one.name != "prefill" else alone(one) for one in whole]
        sets: dict[str, Sequence[Profile]] = {one.name: [one] for one in whole}
        sets |= {"all": whole, "all, prefill of one sequence": fixed}
        for what, profiles in sets.items():
            with tempfile.TemporaryDirectory(dir=scratch) as place:
                plan = build_plan(
                    wanted.library, wanted.capability, bundle.path / graph.file, Path(place) / "copy", copied, profiles
                )  # fmt: skip
            first, end = graph.layers or (0, 0)
            yield {
                "lowering": lowering, "layers": end - first, "profiles": what, "bytes": plan.bytes,
                "weight_bytes": plan.copy.weight_bytes, "beside": plan.bytes - plan.copy.weight_bytes,
            }  # fmt: skip


def alone(profile: Profile) -> Profile:
    """The profile with its batch fixed at one."""
    return replace(profile, ranges={**profile.ranges, "batch": (1, 1, 1)})


def line(row: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    return (
        f"| {row['lowering']} | {row['layers']} | {row['profiles']} | {row['weight_bytes'] / 1e6:.1f} MB | "
        f"{row['bytes'] / 1e6:.1f} MB | {row['beside'] / 1e6:.1f} MB | {row['bytes'] / row['weight_bytes']:.2f} × |"
    )


if __name__ == "__main__":
    main()
