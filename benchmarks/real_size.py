"""Models of the papers at their real sizes, with random weights: build, memory, time, and what a dry run said before.

    python -m benchmarks.real_size [--case NAME …] --folder DIR [--no-run]
    python -m benchmarks.real_size --random-weights NAME BUNDLE      # a float16 bundle alone, for benchmarks/gpu.py

Each case is a random float16 checkpoint of the published model's configuration (in shards of 2 GB; the tokenizer is a
small one of the same kind). It is made, planned with `--dry-run`, built with its layers compared one after the other,
and, where this machine holds it in float32, run for 8 tokens and verified. Then it is built in float16, once as a copy
and once with `--link-weights`, and both give the same 8 tokens; a case with integer weights says instead which share of
the memory's bandwidth plain decoding takes. Cases that are not asked for keep their rows. Peaks are VmHWM of the process that works;
anonymous and file pages are sampled. Needs up to 30 GB of disk and, to run, up to 17 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.build_memory import command, watched
from benchmarks.machine import save, stored
from benchmarks.published_shapes import MODELS as PUBLISHED
from tests.support.programs import program

SHARD = 2_000_000_000
MEMORY_GB, MINUTES = 6.0, 15.0
"""What a build may take: resident memory, and time."""

CASES: dict[str, dict[str, Any]] = {
    "llava, 0.7 B": {
        "like": "llava-1.5-7b",
        "text": {
            "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
        "build": ["--draft-layer", "12"],
        "run": True,
    },
    "llava-1.5-7b": {
        "tiny": "llava",
        "text": {
            "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 4096,
        },
        "vision": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
            "image_size": 336, "patch_size": 14, "projection_dim": 768,
        },
        "build": ["--draft-layer", "16"],
    },
    "llava-1.5-7b, int4": {
        "like": "llava-1.5-7b",
        "build": ["--draft-layer", "16", "--weights", "int4"],
        "run": True,
    },
    "llava-1.5-7b, 8 layers": {
        "like": "llava-1.5-7b",
        "text": {"num_hidden_layers": 8},
        "build": ["--draft-layer", "4"],
        "run": True,
    },
    "qwen2.5-vl-3b": {
        "tiny": "qwen2.5-vl",
        "options": {"tied": True},
        "text": {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "layer_types": ["full_attention"] * 36,
        },
        "vision": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112,
        },
        "files": {
            "preprocessor_config.json": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
            "video_preprocessor_config.json": {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 24576 * 28 * 28}},
        },
        "build": ["--draft-layer", "9", "--max-pixels", "401408"],
        "run": True,
    },
    "qwen2.5-vl-7b": {
        "like": "qwen2.5-vl-3b",
        "options": {"tied": False},
        "text": {
            "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "layer_types": ["full_attention"] * 28,
        },
        "vision": {"out_hidden_size": 3584},
        "run": False,
        "vispec": True,
    },
    "qwen2.5-vl, 0.1 B": {
        "like": "qwen2.5-vl-3b",
        "text": {
            "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
            "num_attention_heads": 12, "num_key_value_heads": 2, "layer_types": ["full_attention"] * 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
        },
        "vision": {
            "depth": 8, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 768,
            "fullatt_block_indexes": [3, 7],
        },
        "build": ["--draft-layer", "4", "--max-pixels", "200704"],
    },
    "tiny, qwen2.5-vl": {"tiny": "qwen2.5-vl", "text": {}, "vision": {}, "build": ["--draft-layer", "1"], "vispec": True},
    "blip2-flant5-xl": {
        "tiny": "blip2-t5",
        "text": {
            "vocab_size": 32128, "d_model": 2048, "d_ff": 5120, "d_kv": 64, "num_heads": 32, "num_layers": 24,
            "num_decoder_layers": 24, "decoder_layers": 24,
        },
        "vision": {
            "hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16,
            "image_size": 224, "patch_size": 14,
        },
        "qformer": {
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "encoder_hidden_size": 1408,
        },
        "top": {"num_query_tokens": 32},
        "build": ["--draft-layer", "12"],
        "run": True,
    },
    "qwen3-vl-4b": {**PUBLISHED["qwen3-vl-4b"], "build": ["--draft-layer", "9", "--max-pixels", "401408"], "run": True},
    "qwen3.5-0.8b": {**PUBLISHED["qwen3.5-0.8b"], "build": ["--draft-layer", "8", "--max-pixels", "401408"], "run": True},
    "smolvlm2-2.2b": {**PUBLISHED["smolvlm2-2.2b"], "build": ["--draft-layer", "6"], "run": True},
    "smolvlm2-256m": {**PUBLISHED["smolvlm2-256m"], "build": ["--draft-layer", "8"], "run": True},
    "internvl3-2b": {**PUBLISHED["internvl3-2b"], "build": ["--draft-layer", "7"], "run": True},
}  # fmt: skip


def resolved(name: str) -> dict[str, Any]:
    """A case, with what it takes over from another."""
    case = CASES[name]
    if "like" not in case:
        return case
    base = resolved(case["like"])
    parts = ("text", "vision")
    return base | case | {part: base[part] | case.get(part, {}) for part in parts}


def untrained_vispec(case: dict[str, Any], model: Path, folder: Path) -> Path:
    """A ViSpec draft for a checkpoint, as its training begins: a layer of the target's own shape, and the target's head."""
    import torch
    from vlmexport.exporter.checkpoint import fingerprint, open_checkpoint
    from vlmexport.exporter.drafts.eagle.eagle_network import EagleConfig
    from vlmexport.exporter.drafts.eagle.vispec import VispecDraft
    from vlmexport.exporter.drafts.eagle.vispec_network import VispecConfig, VispecNetwork
    from vlmexport.exporter.families.registry import family_for

    source = open_checkpoint(str(model))
    family = family_for(source)
    shape, (vocabulary, width) = family.decoder, family.language.head.shape
    text = json.loads((model / "config.json").read_text())
    inner = (text.get("text_config") or text)["intermediate_size"]
    layer = EagleConfig(
        width, vocabulary, shape.num_heads, shape.num_kv_heads, shape.head_dim, inner, head="shared"
    )
    torch.manual_seed(14)
    network = VispecNetwork(VispecConfig(layer, shape.num_heads)).eval()
    target = {"name": model.name, "fingerprint": fingerprint(source), "num_layers": shape.num_layers}
    VispecDraft(network=network, target=target).save(folder)
    return folder


def random_weights(name: str, bundle: Path) -> None:
    """A float16 bundle of a case with random weights: the checkpoint's own files become the bundle's, so that nothing is on
    the disk twice, and the checkpoint goes."""
    import tempfile

    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    case = resolved(name)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=bundle.parent) as place:
        model = Path(place) / "model"
        make(case, model)
        drafts = [str(untrained_vispec(case, model, Path(place) / "vispec"))] if case.get("vispec") else []
        build_bundle(
            BuildRequest(
                model=str(model), output=bundle, precision="float16", parity=False, link_weights=True, drafts=drafts,
                **options_of(case),
            )
        )  # fmt: skip


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    """The options of `build` that a case has, as a request has them."""
    asked = case["build"]
    return {
        key.strip("-").replace("-", "_"): int(value) if value.isdigit() else value
        for key, value in zip(*[iter(asked)] * 2, strict=True)
    }


def make(case: dict[str, Any], folder: Path) -> None:
    """Writes a random checkpoint, one tensor at a time."""
    import torch

    from tests.support import tiny_models

    tiny, tokenizer = tiny_models.BUILDERS[case["tiny"]](**case.get("options", {}))
    config: Any = tiny.config
    for part, changes in (
        (config.text_config, case["text"]),
        (config.vision_config, case["vision"]),
        (getattr(config, "qformer_config", None), case.get("qformer", {})),
        (config, case.get("top", {})),
    ):
        for key, value in changes.items():
            setattr(part, key, value)
    tiny_models.save(tiny, tokenizer, folder, image_side=case["vision"].get("image_size"))
    (folder / "model.safetensors").unlink()
    with torch.device("meta"):
        model = type(tiny)(config)
    for name, content in case.get("files", {}).items():
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | content))
    write_random(model, folder)


def write_random(model: Any, folder: Path) -> None:
    """Shards of float16 tensors whose products keep the scale of what they read; nothing is scaled down (T5's queries
    are not, either, so that its scores are large)."""
    import torch
    from safetensors.torch import save_file

    ties = getattr(model.config, "tie_word_embeddings", False)
    tied = set(getattr(model, "_tied_weights_keys", None) or []) if ties else set()
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tied |= {name for name in model.state_dict() if name.endswith(copies)}
    generator = torch.Generator().manual_seed(1)
    shards: list[dict[str, str]] = []

    def drawn() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in model.named_parameters():
            if name in tied:
                continue
            scale = value[0].numel() ** -0.5 if value.ndim > 1 else 0.02
            if "embed" in name or "shared" in name:
                scale = 1.0 if "shared" in name else 0.3
            tensor = torch.empty(value.shape).normal_(0.0, scale, generator=generator)
            if value.ndim == 1 and "norm" in name.lower() and name.endswith("weight"):
                tensor += 1
            yield name, tensor.half()

    def flush(held: dict[str, torch.Tensor]) -> None:
        file = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        shards.append(dict.fromkeys(held, file))
        held.clear()

    held: dict[str, torch.Tensor] = {}
    for name, tensor in drawn():
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > SHARD:
            flush(held)
        held[name] = tensor
    flush(held)
    table = {name: file for shard in shards for name, file in shard.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


def said(line: list[str]) -> dict[str, Any]:
    """The JSON that a command prints; the status of `verify` is in it."""
    done = subprocess.run(line, capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(f"{' '.join(line)} failed with status {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def measure(name: str, folder: Path, *, run: bool) -> dict[str, Any]:
    """One case: what the dry run said, what the build took, and 8 tokens of the bundle."""
    case = resolved(name)
    model, bundle = folder / "model", folder / "bundle"
    if not (model / "model.safetensors.index.json").exists():
        subprocess.run(program("benchmarks.real_size", "--make", name, model), check=True)
    line = command(
        "build", "--model", model, *case["build"], "-o", bundle, "--force", "--parity-memory", "0", "--json"
    )
    plan = said([*line, "--dry-run"])
    begin = time.monotonic()
    peak = watched(line, folder / "build.json")
    minutes = (time.monotonic() - begin) / 60
    report = json.loads((folder / "build.json").read_text())
    seen = said(command("inspect", bundle, "--json"))
    checkpoint = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    measurements: dict[str, Any] = {
        "parameters_m": round(plan["parameters"] / 1e6),
        "checkpoint_gb": round(checkpoint / 1e9, 2),
        "bundle_gb": round(report["bytes"] / 1e9, 2),
        "build_minutes": round(minutes, 2),
        "estimated_minutes": round(plan["seconds"] / 60, 2),
        "stages_seconds": report["stages"],
        "build_peak": memory(plan["peak_memory"]["build"], peak),
        "parity": {
            row["graph"]: {key: row[key] for key in ("max_abs_difference", "torch_difference", "values")}
            for row in report["parity"]
        },
        "dry_run_agrees": agreement(plan, report, seen),
        "within_limits": peak["VmHWM"] / 1e3 <= MEMORY_GB and minutes <= MINUTES,
    }
    runs, integers = run and case.get("run"), "--weights" in case["build"]
    if runs:
        measurements |= served(model, bundle, folder, plan["peak_memory"]["run"])
    if runs and integers:
        measurements |= plain(bundle, folder)
    shutil.rmtree(bundle)
    for form in () if integers else ("float16", "linked"):
        measurements[form] = narrow(name, form, folder, checkpoint)
        if runs:
            measurements[form] |= same_tokens(folder, folder / form, measurements["run_peak"]["peak"])
        shutil.rmtree(folder / form)
    shutil.rmtree(folder)
    return measurements


def plain(bundle: Path, folder: Path) -> dict[str, Any]:
    """Plain decoding, and the share that it takes of what this machine's memory gives to its cores."""
    from vlmexport.runtime.bundle.folder import Bundle
    from vlmexport.runtime.measure.fit import scales

    manifest = Bundle.open(bundle).manifest
    # A pass reads every matrix of the decoder and of its head once, with a float32 scale a block; the cache is not counted.
    read = sum(
        manifest.integer_bytes(name) + 4 * scales(manifest, name) for name in (*manifest.segments, "head")
    )
    bandwidth = read_bandwidth()
    result, _, _ = asked(folder, bundle, "--draft", "none", "--max-new-tokens", "32")
    speed = result["stats"]["tokens_per_second"]
    return {
        "plain_tokens_per_second": speed,
        "bytes_per_token_gb": round(read / 1e9, 3),
        "bandwidth_gb_per_second": round(bandwidth / 1e9, 2),
        "share_of_bandwidth": round(speed * read / bandwidth, 3),
    }


def read_bandwidth(size: int = 1 << 30, threads: int = 2, rounds: int = 5) -> float:
    """Bytes per second that cores read of memory that is in no cache: the best round."""
    import numpy as np

    parts = np.array_split(np.ones(size // 8), threads)
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            best = min(best, time.perf_counter() - begin)
    return size / best


def narrow(name: str, form: str, folder: Path, checkpoint: int) -> dict[str, Any]:
    """A bundle of float16, without parity, which the tests compare; what it takes of the disk."""
    line = program("benchmarks.real_size", "--narrow", name, folder / "model", folder / form)
    begin = time.monotonic()
    peak = watched([*line, *(["linked"] if form == "linked" else [])])
    seconds = time.monotonic() - begin
    files = [file.stat() for file in (folder / form).iterdir()]
    own = sum(file.st_size for file in files if file.st_nlink == 1)
    return {
        "build_seconds": round(seconds, 1),
        "build_peak_gb": round(peak["VmHWM"] / 1e3, 2),
        "bundle_of_checkpoint": round(sum(file.st_size for file in files) / checkpoint, 4),
        "disk_of_checkpoint": round(own / checkpoint, 4),
    }


def build_narrow(name: str, model: Path, bundle: Path, *, linked: bool) -> None:
    """Worker."""
    from vlmexport.exporter.pipeline import BuildRequest, build_bundle

    request = BuildRequest(
        model=str(model), output=bundle, precision="float16", parity=False, link_weights=linked,
        **options_of(resolved(name)),
    )  # fmt: skip
    build_bundle(request)


def same_tokens(folder: Path, bundle: Path, wide: float) -> dict[str, Any]:
    """The request of `served` again; memory as a share of what the float32 bundle took (GB)."""
    result, peak, seconds = asked(folder, bundle)
    return {
        "run_seconds": seconds,
        "run_peak_gb": round(peak["VmHWM"] / 1e3, 2),
        "run_peak_of_float32": round(peak["VmHWM"] / 1e3 / wide, 3),
        "tokens_equal": result["tokens"] == json.loads((folder / "expected.json").read_text()),
        "tokens_per_second": result["stats"].get("tokens_per_second"),
    }


def asked(folder: Path, bundle: Path, *more: str) -> tuple[dict[str, Any], dict[str, float], float]:
    """8 tokens for a picture, with `more` options: what `run` says, the largest values of its memory in MB, seconds in all."""
    from PIL import Image

    picture = folder / "picture.png"
    Image.effect_mandelbrot((300, 200), (-2, -1.2, 1, 1.2), 60).convert("RGB").save(picture)
    options = ("--image", picture, "--prompt", "describe", "--max-new-tokens", "8", "--json", *more)
    begin = time.monotonic()
    peak = watched(command("run", bundle, *options), folder / "run.json")
    seconds = round(time.monotonic() - begin, 1)
    return json.loads((folder / "run.json").read_text()), peak, seconds


def memory(estimate: int, peak: dict[str, float]) -> dict[str, float]:
    """In GB: what was said before, and what was seen (`watched`)."""
    seen = {"peak": peak["VmHWM"], "anonymous": peak["RssAnon"], "file": peak["RssFile"]}
    return {"estimate": round(estimate / 1e9, 2), **{name: round(mb / 1e3, 2) for name, mb in seen.items()}}


def agreement(plan: dict[str, Any], report: dict[str, Any], seen: dict[str, Any]) -> bool:
    """Whether the dry run said what the build reports and `inspect` shows."""
    keys = ("bytes_per_token", "bytes_per_image", "bytes_per_sequence")
    return (
        [plan[f"kv_{key}"] for key in keys] == [seen["kv"][key] for key in keys]
        and plan["parameters"] == report["parameters"] == seen["model"]["parameters"]
        and plan["weight_bytes"] == report["weight_bytes"] == seen["weights"]["bytes"]
        and [g["name"] for g in plan["graphs"]] == [g["name"] for g in seen["graphs"]]
    )


def served(model: Path, bundle: Path, folder: Path, estimate: int) -> dict[str, Any]:
    """8 tokens, and losslessness of every draft, at full size."""
    result, peak, seconds = asked(folder, bundle)
    (folder / "expected.json").write_text(json.dumps(result["tokens"]))
    begin = time.monotonic()
    checked = said(
        command(
            "verify", bundle, "--model", model, "--prompts", "1", "--max-new-tokens", "8",
            "--parity-memory", "0", "--json",
        )
    )  # fmt: skip
    return {
        "run_seconds": seconds,
        "tokens": len(result["tokens"]),
        "tokens_per_second": result["stats"].get("tokens_per_second"),
        "run_peak": memory(estimate, peak),
        "verified": checked["ok"],
        "verify_minutes": round((time.monotonic() - begin) / 60, 2),
        "failures": checked["failures"],
    }


def main() -> None:
    if sys.argv[1:2] == ["--make"]:
        make(resolved(sys.argv[2]), Path(sys.argv[3]))
        return
    if sys.argv[1:2] == ["--narrow"]:
        build_narrow(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), linked="linked" in sys.argv[5:])
        return
    if sys.argv[1:2] == ["--random-weights"]:
        random_weights(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    real = [name for name in CASES if not name.startswith("tiny")]
    parser.add_argument("--case", action="append", choices=real, help="repeatable; all by default")
    parser.add_argument("--folder", type=Path, required=True, help="where models go for a while")
    parser.add_argument("--no-run", action="store_true", help="build only")
    parser.add_argument("--no-save", action="store_true", help="print only")
    arguments = parser.parse_args()
    rows = stored("real-size", "cases")
    for name in arguments.case or real:
        place = arguments.folder / name.replace(", ", "-").replace(" ", "-")
        rows[name] = measure(name, place, run=not arguments.no_run)
        print(name, json.dumps(rows[name]), flush=True)
    if not arguments.no_save:
        result = {"script": "benchmarks/real_size.py", "limits": {"gb": MEMORY_GB, "minutes": MINUTES}, "cases": rows}  # fmt: skip
        print(save("real-size", result, "torch", "transformers"))


if __name__ == "__main__":
    main()
