"""Evaluates a published folder on held-out scenes and writes the figures as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import AutoTokenizer, Blip2ForConditionalGeneration

from ...scenes.grammar import DESCRIBE, caption
from ...scenes.scene import HELDOUT, TRAIN, VALIDATION, sample_scene
from ...scenes.text_stats import NgramModel, prompt_lookup_tau
from .evaluation import evaluate_scenes, picture_perplexity


def evaluate_folder(folder: Path, scenes: int = 1000, seed: int = 0) -> dict[str, object]:
    """All published figures of a model folder, on the first ``scenes`` held-out scenes.

    The fp16 weights are loaded as fp32, as the exporter does for a CPU.
    """
    model = Blip2ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    clock = time.time()
    captions = {
        span: tokenizer([caption(sample_scene(seed, i)) for i in span])["input_ids"]
        for span in (TRAIN[:40_000], VALIDATION[:scenes])
    }
    known, other = captions.values()
    prompt = tokenizer(DESCRIBE)["input_ids"]
    tokens = sum(map(len, other))
    return {
        "model": folder.name,
        "scenes": scenes,
        "seed": seed,
        "heldout": evaluate_scenes(model, tokenizer, seed, HELDOUT[:scenes]),
        "grey_picture": evaluate_scenes(model, tokenizer, seed, HELDOUT[: min(scenes, 200)], grey=True),
        "perplexity_with_picture": round(picture_perplexity(model, tokenizer, seed, HELDOUT[:scenes]), 4),
        "text_alone": {
            "five_gram_perplexity_by_training_captions": {
                str(n): round(NgramModel(known[:n]).perplexity(other), 4) for n in (8_000, 40_000)
            },
            "prompt_lookup_tau": round(tokens / sum(len(t) / prompt_lookup_tau(prompt, t) for t in other), 4),
            "caption_tokens": {
                "least": min(map(len, other)),
                "mean": round(tokens / scenes, 2),
                "most": max(map(len, other)),
            },
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": {f.name: f.stat().st_size for f in sorted(folder.iterdir()) if f.is_file()},
        "seconds": round(time.time() - clock, 1),
        "machine": machine(),
    }


def machine() -> dict[str, object]:
    """The processor and the versions that the figures belong to."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    versions = {package: version(package) for package in ("torch", "transformers", "numpy", "pillow")}
    return {"cpu": name, "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def main() -> None:
    """Command line of the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    text = json.dumps(evaluate_folder(options.folder, options.scenes), indent=2) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
