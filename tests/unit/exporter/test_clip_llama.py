"""CLIP, one linear layer and a LLaMA (FastVLM, appendix A.1), put together by the example, as a bundle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel
from vlmexport.exporter.families.common.sample_inputs import odd_picture
from vlmexport.exporter.pipeline import BuildRequest, build_bundle
from vlmexport.runtime import Session

from tests.support import tiny_models
from tests.support.tiny_bundles import untrained_layer, untrained_vispec

EXAMPLE = Path(__file__).parents[3] / "examples/clip_llama.py"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("parts")
    torch.manual_seed(3)
    config = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=16
    )  # fmt: skip
    CLIPVisionModel(config).save_pretrained(folder / "clip")
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    CLIPImageProcessorPil(**sizes).save_pretrained(folder / "clip")
    tiny_models.checkpoint("llama", folder / "llama")
    save_file({"weight": torch.randn(96, 64), "bias": torch.randn(96)}, folder / "projector.safetensors")
    return {name: folder / name for name in ("clip", "llama", "projector.safetensors")}


def assemble(parts: dict[str, Path], output: Path, **changed: Any) -> subprocess.CompletedProcess[str]:
    given = parts | changed
    line = [sys.executable, EXAMPLE, "--clip", given["clip"], "--llama", given["llama"], "--projector",
            given["projector.safetensors"], "-o", output]  # fmt: skip
    return subprocess.run([str(word) for word in line], capture_output=True, text=True, timeout=300)


def test_the_parts_become_a_bundle_that_speaks_like_transformers(
    parts: dict[str, Path], tmp_path: Path
) -> None:
    done = assemble(parts, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    stored = load_file(tmp_path / "model/model.safetensors")
    layer = load_file(parts["projector.safetensors"])
    assert torch.equal(stored["multi_modal_projector.linear_1.weight"], layer["weight"])
    assert torch.equal(stored["multi_modal_projector.linear_2.weight"], torch.eye(96))
    request = BuildRequest(
        model=str(tmp_path / "model"), output=tmp_path / "bundle", draft_layer=1, max_length=160,
        default_prompt="Describe the image",
    )  # fmt: skip
    report = build_bundle(request)  # a whole generation is compared with transformers there
    assert report.family == "llava" and {"vision", "generation"} <= {row["graph"] for row in report.parity}
    with Session.load(tmp_path / "bundle") as session:
        described = session.generate(odd_picture(1), max_new_tokens=12, draft="early-exit@1", draft_length=3)
        plain = session.generate(odd_picture(1), "Describe the image", max_new_tokens=12, draft="none")
    assert described.tokens == plain.tokens and described.stats.proposed


@pytest.mark.slow
def test_layers_of_eagle_and_vispec_change_no_token(parts: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert assemble(parts, model).returncode == 0
    drafts = [untrained_layer(model, tmp_path / "eagle"), untrained_vispec(model, tmp_path / "vispec")]
    build_bundle(
        BuildRequest(model=str(model), output=tmp_path / "bundle", drafts=[*map(str, drafts)], max_length=160)
    )
    shapes: list[dict[str, Any]] = [
        {"draft_length": 4}, {"draft_length": 3, "draft_nodes": 8}, {"draft_length": 4, "temperature": 1.0, "seed": 3},
    ]  # fmt: skip
    with Session.load(tmp_path / "bundle") as session:
        for picture, prompt in ((odd_picture(1), "a cup"), (odd_picture(2), "what"), (None, "a cup")):
            for shape in shapes:
                drawn = {name: shape[name] for name in ("temperature", "seed") if name in shape}
                plain = session.generate(picture, prompt, max_new_tokens=16, draft="none", **drawn)
                for name in ("eagle", "vispec"):
                    drafted = session.generate(picture, prompt, max_new_tokens=16, draft=name, **shape)
                    assert drafted.tokens == plain.tokens and drafted.stats.proposed, (name, shape)


def test_a_layer_of_another_width_is_one_line(parts: dict[str, Path], tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(64, 96)}, tmp_path / "wrong.safetensors")
    done = assemble(parts, tmp_path / "model", **{"projector.safetensors": tmp_path / "wrong.safetensors"})
    assert done.returncode == 1 and not (tmp_path / "model").exists()
    assert "(96, 64) is needed" in done.stderr.strip().splitlines()[-1] and "Traceback" not in done.stderr
