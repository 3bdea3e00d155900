"""The recipe's stages at a size that trains in seconds."""

# ruff: noqa: E402 - the imports need what importorskip checks

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from vlmexport.calibration.workshop import precision
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.decoder_stage import train_decoder
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.evaluation import bleu4
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.labels import mirrored, scene_labels
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.optimizer import Muon, newton_schulz, schedule
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.texts import text_table
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.tokenizer import build_tokenizer
from vlmexport.calibration.workshop.recipes.tiny_blip2_flant5.vision_stage import train_vision
from vlmexport.calibration.workshop.scenes import TRAIN, mirror, sample_scene
from vlmexport.runtime.errors import OptionError


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


def test_text_tables_are_as_wide_as_their_texts(tmp_path):
    tokenizer = build_tokenizer(0)
    table = text_table(tmp_path / "texts.npz", 0, TRAIN[:12], tokenizer)
    for name in ("caption", "question", "answer"):
        ids = table[name].reshape(-1, table[name].shape[-1])
        assert (ids[:, -1] != 0).any(), f"{name}: the last column belongs to the longest"
        assert all(row[np.flatnonzero(row)[-1]] == tokenizer.eos_token_id for row in ids), (
            f"{name}: nothing is cut"
        )


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
    train_vision(tmp_path, 6, size=64, batch_size=8, precision="fp32")
    train_decoder(tmp_path, 3, tmp_path / "model", size=64, batch_size=4)
    checkpoint = train_decoder(tmp_path, 5, tmp_path / "model", size=64, batch_size=4, joint=1)
    assert torch.load(checkpoint, weights_only=False)["step"] == 5
    lines = [json.loads(line) for line in (tmp_path / "decoder.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 5]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert len((tmp_path / "STATUS.txt").read_text().splitlines()) == 2
