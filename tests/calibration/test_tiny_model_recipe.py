"""The recipe's stages at a size that trains in seconds."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.decoder_stage import train_decoder
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.evaluation import bleu4
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.labels import mirrored, scene_labels
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.optimizer import Muon, newton_schulz, schedule
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.vision_stage import train_vision
from vlmexport.calibration.workshop.scenes import TRAIN, mirror, sample_scene


def test_mirrored_labels_are_the_labels_of_the_mirrored_scene():
    for index in TRAIN[:40]:
        scene = sample_scene(0, index)
        ours, truth = mirrored(scene_labels(scene)), scene_labels(mirror(scene))
        for name in truth:
            if name != "owner":  # boundaries of boxes may fall on the other side of a patch centre
                assert np.array_equal(ours[name], truth[name]), (index, name)


def test_newton_schulz_flattens_singular_values():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


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


def test_schedule_warms_up_and_decays():
    values = [schedule(s, 100, 10) for s in range(100)]
    assert values[0] == pytest.approx(0.1)
    assert max(values) == pytest.approx(1.0)
    assert values[-1] < 0.03


def test_bleu4():
    assert bleu4([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]]) == pytest.approx(1.0)
    assert bleu4([[9, 8, 7, 6]], [[1, 2, 3, 4]]) == 0.0
    assert 0 < bleu4([[1, 2, 3, 4, 9]], [[1, 2, 3, 4, 5]]) < 1


@pytest.mark.slow
def test_stages_run_and_resume(tmp_path):
    train_vision(tmp_path, 4, size=64, batch_size=8)
    train_vision(tmp_path, 6, size=64, batch_size=8)
    train_decoder(tmp_path, 3, tmp_path / "model", size=64, batch_size=4)
    checkpoint = train_decoder(tmp_path, 5, tmp_path / "model", size=64, batch_size=4, joint=1)
    assert torch.load(checkpoint, weights_only=False)["step"] == 5
    lines = [json.loads(line) for line in (tmp_path / "decoder.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 5]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert len((tmp_path / "STATUS.txt").read_text().splitlines()) == 2
