"""`vlmexport export-draft` against the package `speculators` in an environment of its own: the same logits?

    python -m benchmarks.export_draft

The environment is made with pip in the user's cache folder (about 1 GB); `--python FILE` names an interpreter that has the package
already. A tiny Llama is made, a draft of it trained for a few steps and exported. The package loads the checkpoint, and its
logits of random tokens and features are compared with those of PyTorch here. `--model` and `--draft` name others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import save

LIMIT = 1e-4
OTHERS = [
    "torch==2.13.0",
    "loguru",
    "pydantic-settings",
    "accelerate",
    "click",
    "httpx",
    "protobuf",
    "rich",
    "typer",
    "openai",
    "datasets",
    "aiohttp",
    "tqdm",
    "psutil",
    "hs-connectors",
]
"""What the package needs of others to load a checkpoint; the rest of its requirements is for training."""
VERSIONS = {"eagle": ("0.2.0", "4.53.3"), "eagle3": ("0.9.0", "5.19.0")}
"""Draft kind → versions of speculators and of transformers. Newer ones of the package have no type eagle."""

INSIDE = """
import json, sys
from importlib.metadata import version
import numpy as np
import torch
from speculators import SpeculatorModel
from transformers import AutoModelForCausalLM

checkpoint, model, values, kind = sys.argv[1:]
given = np.load(values)
ids, features = torch.from_numpy(given["ids"]), torch.from_numpy(given["features"])
if kind == "eagle":
    verifier = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32)
    draft = SpeculatorModel.from_pretrained(checkpoint, verifier=verifier, verifier_attachment_mode="full")
    with torch.no_grad():
        logits = draft(input_ids=ids, hidden_states=features, attention_mask=torch.ones_like(ids)).logits
else:
    from speculators.models.attention import create_float_mask

    draft = SpeculatorModel.from_pretrained(checkpoint)
    # Its own attention is made for GPUs.
    draft.config.transformer_layer_config._attn_implementation = draft._attn_impl = "eager"
    draft._create_mask_fn = create_float_mask
    verifier = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    draft.embed_tokens.load_state_dict(verifier.get_input_embeddings().state_dict())
    outputs = []
    draft.lm_head.register_forward_hook(lambda module, hidden_states, output: outputs.append(output))
    with torch.no_grad():
        for text, feature in zip(ids, features):
            draft(feature[None], text[None], torch.zeros(1, len(text), dtype=torch.long), ttt_steps=1)
    logits = torch.cat(outputs)
wanted = torch.from_numpy(given["logits"])
assert logits.shape == wanted.shape, (logits.shape, wanted.shape)
print(json.dumps({
    "class": type(draft).__name__, "speculators": version("speculators"), "transformers": version("transformers"),
    "largest_logit": wanted.abs().max().item(), "largest_difference": (logits - wanted).abs().max().item(),
    "same_tokens": (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item(),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", type=Path, help="an interpreter that has speculators")
    parser.add_argument("--kind", default="eagle", choices=list(VERSIONS))
    parser.add_argument("--model", help="folder of a Llama; with --draft")
    parser.add_argument("--draft", help="folder of its EAGLE draft")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/export-KIND.json")
    options = parser.parse_args()
    python = options.python or environment(*VERSIONS[options.kind])
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = Path(options.model) if options.model else tiny_llama(work)
        draft = Path(options.draft) if options.draft else trained(work, model, options.kind)
        line = [
            "export-draft",
            str(draft),
            "-o",
            str(work / "checkpoint"),
            "--format",
            "speculators",
            "--json",
        ]
        written = json.loads(vlmexport(*line, "--model", str(model)))
        reference(model, draft, work / "values.npz")
        done = subprocess.run(
            [python, "-I", "-c", INSIDE, work / "checkpoint", model, work / "values.npz", options.kind],
            capture_output=True,
            text=True,
            cwd=work,
        )
    if done.returncode:
        sys.exit(done.stderr)
    comparison = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps({"notices": written["notices"], **comparison}, indent=1))
    if options.save:
        print(
            save(
                f"export-{options.kind}",
                {"parameters": written["parameters"], **comparison},
                "torch",
                "transformers",
            )
        )
    if not comparison["largest_difference"] <= LIMIT:
        sys.exit(f"the logits differ by {comparison['largest_difference']:.2g}, more than {LIMIT:g}")


def environment(version: str, transformers: str) -> Path:
    """The interpreter of an environment with this version of the package, made where there is none yet."""
    from vlmexport.runtime.common.atomic_files import cache_folder

    folder = cache_folder() / f"speculators-{version}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *OTHERS, f"transformers=={transformers}"], check=True)
        subprocess.run([*pip, "--no-deps", f"speculators=={version}"], check=True)
        (folder / "complete").touch()
    return python


def tiny_llama(work: Path) -> Path:
    """A random Llama as the tests have it."""
    from tests.support import tiny_models

    return tiny_models.checkpoint("llama", work / "model", num_hidden_layers=5)


def trained(work: Path, model: Path, kind: str) -> Path:
    """A draft after a few steps of training."""
    lines = [
        {"prompt": f"the red cup {n}", "answer": f"a box and the ball number {n} lie there"}
        for n in range(16)
    ]
    config = json.loads((model / "config.json").read_text())
    data = work / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = [
        "train",
        "--model",
        str(model),
        "--draft",
        kind,
        "--data",
        str(data),
        "-o",
        str(work / "draft"),
    ]
    heads = str(config["hidden_size"] // config["head_dim"])  # the package takes the target's rotary angles
    more = ["--head", "trimmed", "--head-vocabulary", "60"] if kind == "eagle3" else []
    vlmexport(
        *line, "--steps", "40", "--lr", "3e-3", "--batch-size", "8", "--attention-heads", heads, "-q", *more
    )
    return work / "draft"


def reference(model: Path, draft: Path, values: Path) -> None:
    """Random tokens, the target's features of them, and what the draft's network says of both."""
    from transformers import AutoModelForCausalLM
    from vlmexport.exporter.drafts.folders import open_draft

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded: Any = open_draft(draft)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, target.config.vocab_size, (2, 48)))
    count = ids.shape[1] - 1
    with torch.no_grad():
        every = target(ids, output_hidden_states=True).hidden_states
        features = every[-1][:, :-1]
        if loaded.kind == "eagle3":
            features = torch.cat([every[tap][:, :-1] for tap in loaded.network.config.taps], -1)
        following = ids[:, 1:].contiguous()
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        given = loaded.network.fc(features) if loaded.kind == "eagle3" else features
        draft_features, _ = loaded.network(
            target.get_input_embeddings()(following), given, torch.arange(count)[None], mask
        )
        logits = loaded.network.logits(draft_features, target.lm_head.weight)
    np.savez(values, ids=following.numpy(), features=features.numpy(), logits=logits.numpy())


def vlmexport(*line: str) -> str:
    """What the command prints on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "vlmexport", *line], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


if __name__ == "__main__":
    main()
