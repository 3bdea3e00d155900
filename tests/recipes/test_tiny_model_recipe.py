"""The recipe's stages at a size that trains in seconds."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vlmexport.calibration.data.scenes import TRAIN, mirror, sample_scene
from vlmexport.runtime.common.errors import OptionError

from recipes import precision
from recipes.common.labels import mirrored, scene_labels
from recipes.common.optimizer import Muon, newton_schulz, schedule
from recipes.tiny_blip2_flant5 import __main__ as recipe
from recipes.tiny_blip2_flant5 import vision_stage
from recipes.tiny_blip2_flant5.vision_stage import train_vision


def test_mirrored_labels_are_the_labels_of_the_mirrored_scene():
    for index in TRAIN[:40]:
        scene = sample_scene(0, index)
        ours, truth = mirrored(scene_labels(scene)), scene_labels(mirror(scene))
        for name in truth:
            if name != "owner":  # boundaries of boxes may fall on the other side of a patch centre
                assert np.array_equal(ours[name], truth[name]), (index, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_flattens_singular_values(dtype):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 32, 64), dtype=dtype).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_the_precision_is_what_the_processor_has_units_for(tmp_path):
    """`auto` is bf16 only where a flag names the units; the matrix products really are of that type."""
    cpuinfo = tmp_path / "cpuinfo"
    for text, units in (
        ("model name\t: x\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f\nbugs\t\t: bf16\n", False),
        ("", False),
    ):
        cpuinfo.write_text(text)
        assert precision.has_bf16_units(cpuinfo) == units, text
    assert not precision.has_bf16_units(tmp_path / "nothing")
    for units, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(precision, "has_bf16_units", lambda units=units: units)
            assert precision.dtype_of("auto") == dtype
            assert (precision.dtype_of("fp32"), precision.dtype_of("bf16")) == (torch.float32, torch.bfloat16)
    with pytest.raises(OptionError, match="--precision 'fp16'"):
        precision.dtype_of("fp16")
    for dtype in (torch.float32, torch.bfloat16):
        with precision.computing(dtype):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_muon_lowers_a_quadratic():
    torch.manual_seed(0)
    truth, weight = torch.randn(16, 8), torch.nn.Parameter(torch.zeros(16, 8))
    optimizer = Muon([weight], lr=0.1, weight_decay=0.0)
    before = (weight - truth).square().sum().item()
    for _ in range(60):
        optimizer.zero_grad()
        (weight - truth).square().sum().backward()
        optimizer.step()
    assert (weight - truth).square().sum().item() < 0.2 * before


def test_joined_matrices_are_orthogonalised_one_by_one():
    """GPT-2 keeps query, key and value side by side; as one matrix the largest would decide for all."""
    torch.manual_seed(0)
    apart = [torch.nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    other = torch.nn.Parameter(torch.zeros(8, 24))  # of the same shape, but one matrix
    joined = torch.nn.Parameter(torch.zeros(8, 24))
    gradients = [torch.randn(8, 8) * scale for scale in (1.0, 10.0, 0.1)]
    for p, gradient in zip(apart, gradients, strict=True):
        p.grad = gradient
    for p in (other, joined):
        p.grad = torch.cat(gradients, 1)
    for params, known in ((apart, []), ([other, joined], [joined])):
        Muon(params, lr=0.1, dtype=torch.float32, joined=known).step()
    expected = torch.cat([p.detach() for p in apart], 1)
    assert torch.allclose(joined.detach(), expected, atol=1e-6)
    assert not torch.allclose(other.detach(), expected, atol=1e-2)


def test_schedule_warms_up_and_decays():
    values = [schedule(s, 100, 10) for s in range(100)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == pytest.approx(1.0)
    assert values[-1] < 0.03


def test_a_resumed_vision_stage_is_the_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setattr(vision_stage, "CHECKED", 20)
    small = {"size": 64, "batch_size": 8, "precision": "fp32"}
    assert train_vision(tmp_path / "one", 6, **small) == 6
    assert train_vision(tmp_path / "two", 6, stop_at=4, **small) == 4
    assert train_vision(tmp_path / "two", 6, **small) == 6
    one, two = (torch.load(tmp_path / n / "vision" / "state.pt", weights_only=True) for n in ("one", "two"))
    assert one["step"] == two["step"] == 6 and len(one["model"]) > 50
    assert all(torch.equal(value, two["model"][name]) for name, value in one["model"].items())
    lines = [
        json.loads(line) for line in (tmp_path / "two" / "vision" / "log.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [4, 6] and "object" in lines[-1]


@pytest.mark.slow
def test_one_command_makes_a_model_with_its_record_and_evaluation(tmp_path, monkeypatch):
    words = [
        "--vision-steps",
        3,
        "--pictures",
        64,
        "--steps",
        2,
        "--captions",
        2,
        "--questions",
        2,
        "--scenes",
        4,
        "--threads",
        1,
    ]
    monkeypatch.setattr(
        "sys.argv", ["recipe", "--out", str(tmp_path), "--precision", "fp32", *map(str, words)]
    )
    recipe.main()
    record = json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert record["settings"]["start"] == "none" and record["settings"]["steps"] == 2
    assert record["vision_curve"][-1]["step"] == 3 and record["curve"][-1]["step"] == 2
    assert (tmp_path / "model" / "model.safetensors").exists()
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["scenes"] == 4 and not found["musts"]["facts"]["met"]
