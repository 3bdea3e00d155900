"""`build` on random weights with the layer counts of BLIP-2 FlanT5-XL at reduced width, saved in shards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vlmexport.runtime.bundle.folder import Bundle

from tests.support import tiny_models

BUILD = """
import json, sys
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
import vlmexport.exporter.families.registry, vlmexport.exporter.parity  # what is loaded counts as the base

def peak():  # in KiB; not ru_maxrss, which begins with what the process that was forked had taken
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

before = peak()
report = build_bundle(BuildRequest(model=sys.argv[1], output=sys.argv[2], draft_layer=int(sys.argv[3]), parity=False))
print(json.dumps({"report": json.loads(report.model_dump_json()), "growth": (peak() - before) * 1024}))
"""


def build_apart(source: Path, output: Path, layer: int) -> dict[str, Any]:
    """Builds in a process of its own: the report, and by how many bytes its peak memory grew."""
    command = [sys.executable, "-c", BUILD, str(source), str(output), str(layer)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_flan_t5_xl_layer_counts(tmp_path: Path) -> None:
    source = tiny_models.checkpoint(
        "blip2-t5",
        tmp_path / "model",
        vision_layers=39,
        qformer_layers=12,
        num_layers=24,
        num_decoder_layers=24,
        max_shard_size="4MB",
    )
    shards = sorted(source.glob("model-*.safetensors"))
    assert len(shards) > 3
    answer = build_apart(source, tmp_path / "bundle", 12)
    report = answer["report"]
    assert report["cuts"] == [0, 12, 24] and report["seconds"] < 120
    bundle = Bundle.open(tmp_path / "bundle", check="sha256")
    graphs = bundle.manifest.graphs
    assert graphs["segment.0"].layers == [0, 12] and graphs["segment.1"].layers == [12, 24]
    assert len(graphs["cross_kv"].outputs) == 48
    stored = sum(p.stat().st_size for p in shards)
    assert report["weight_bytes"] <= 1.05 * stored  # float32 shards: every tensor once, small gaps only


@pytest.mark.slow
def test_memory_stays_near_the_largest_shard(tmp_path: Path) -> None:
    """A model of 12 shards of 40 MB: building may hold a few shards (and the tracer's 100 MB), never the model."""
    source = tiny_models.checkpoint(
        "llama",
        tmp_path / "model",
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_shard_size="40MB",
    )
    assert len(list(source.glob("model-*.safetensors"))) >= 10
    answer = build_apart(source, tmp_path / "bundle", 4)
    assert answer["report"]["weight_bytes"] > 400e6
    assert answer["growth"] < 100e6 + 5 * 40e6
