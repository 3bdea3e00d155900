"""Families: what is refused, what the parts are, and that everything that can be built can be run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vlmexport.exporter.checkpoint import open_checkpoint
from vlmexport.exporter.common.aliases import ALIASES
from vlmexport.exporter.families.common.reference import collate, decoder_prefix, reference_inputs
from vlmexport.exporter.families.languages import LANGUAGES
from vlmexport.exporter.families.registry import FAMILIES, family_for
from vlmexport.exporter.parity.reference import load_reference
from vlmexport.runtime.common.errors import UnsupportedModelError
from vlmexport.runtime.families import FAMILIES as RUNTIME_FAMILIES

from tests.support import tiny_models


def test_every_built_family_can_be_run() -> None:
    assert {family.name for family in FAMILIES} <= set(RUNTIME_FAMILIES)
    assert {alias.family for alias in ALIASES} <= {family.name for family in FAMILIES}


def test_every_family_and_language_has_a_tiny_checkpoint(tmp_path: Path) -> None:
    found = set()
    for name in tiny_models.BUILDERS:
        family = family_for(open_checkpoint(tiny_models.checkpoint(name, tmp_path / name)))
        found.add((family.name, family.decoder_name))
    assert {family for family, _ in found} == {family.name for family in FAMILIES}
    assert {decoder for _, decoder in found} == set(LANGUAGES)


@pytest.mark.parametrize("name", tiny_models.BUILDERS)
def test_model_parts_reproduce_the_logits(tiny_checkpoint: Callable[..., Path], name: str) -> None:
    """Rows before the final norm through norm, scale and head; image rows as the vision tower gives them."""
    family = family_for(open_checkpoint(tiny_checkpoint(name)))
    model = load_reference(family.checkpoint, streamed=False)
    parts = family.parts(model)
    kept: dict[str, Any] = {}
    parts.final_norm.register_forward_pre_hook(lambda _, rows: kept.update(rows=rows[0]))
    for kind in ("random", "realistic"):
        inputs = reference_inputs(family, kind, 3, 9)
        with torch.no_grad():
            logits = model(**inputs).logits
            made = parts.capped(parts.lm_head(parts.final_norm(kept["rows"]) * parts.logit_scale))
        torch.testing.assert_close(made, logits)
    assert len(parts.layers) == family.decoder.num_layers
    assert (parts.encoder is not None) == (family.encoder() is not None)
    assert (parts.vision_output is not None) == (family.image() is not None)


@pytest.mark.parametrize("name", tiny_models.BUILDERS)
def test_a_batch_says_what_each_request_alone_says(tiny_checkpoint: Callable[..., Path], name: str) -> None:
    family = family_for(open_checkpoint(tiny_checkpoint(name)))
    model = load_reference(family.checkpoint, streamed=False)
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 255, (41, 29, 3), dtype=np.uint8))
    image = None if family.vision is None else picture
    prompts = [family.reference_prompt(image, text) for text in ("the red cup", "a cup is on the table")]
    texts = [[40, 41, 42], [43]]
    with torch.no_grad():
        together = model(**collate(family, prompts, texts)).logits
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            alone = model(**collate(family, [prompt], [text])).logits[0]
            assert len(alone) == len(decoder_prefix(prompt)) + len(text)
            torch.testing.assert_close(together[row, : len(alone)], alone, atol=1e-4, rtol=1e-4)


def changed(folder: Path, part: str | None, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (config if part is None else config[part]).update(values)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "part", "values", "message"),
    [
        ("blip2-opt", "text_config", {"word_embed_proj_dim": 48}, "word_embed_proj_dim=48"),
        ("blip2-opt", "text_config", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("blip2-opt", "text_config", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("vit-gpt2", "decoder", {"add_cross_attention": False}, "add_cross_attention"),
        ("vit-gpt2", "decoder", {"n_layer": 1}, "a decoder of 1 layer cannot be cut"),
        ("vit-gpt2", "encoder", {"model_type": "deit"}, "of 'deit' and 'gpt2' is not supported"),
        ("llava", "text_config", {"model_type": "mistral"}, "the language model 'mistral' is not supported"),
        (
            "llava",
            "vision_config",
            {"model_type": "siglip_vision_model"},
            "vision tower 'siglip_vision_model'",
        ),
        ("llava", None, {"vision_feature_layer": [-2, -5]}, r"vision_feature_layer=\[-2, -5\] is not one of"),
        ("llava", None, {"vision_feature_layer": -9}, "vision_feature_layer=-9 is not one of the 4 states"),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, name: str, part: str | None, values: dict, message: str
) -> None:
    folder = changed(tiny_models.checkpoint(name, tmp_path), part, **values)
    with pytest.raises(UnsupportedModelError, match=message):
        family_for(open_checkpoint(folder))


def test_a_picture_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = tiny_models.checkpoint("vit-gpt2", tmp_path)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": 48}))
    with pytest.raises(UnsupportedModelError, match="size 48 differs from the vision tower's 32 x 32"):
        family_for(open_checkpoint(folder)).image()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop_size": {"height": 48, "width": 48}}, "differs from the vision tower's 32 x 32"),
        ({"do_center_crop": False}, "do_center_crop=false"),
        ({"do_pad": True}, "do_pad=true"),
        ({"size": {"height": 32, "width": 32}}, "is not a shortest_edge"),
        ({"size": {"shortest_edge": 32, "longest_edge": 64}}, "is not a shortest_edge"),
    ],
)
def test_a_cropping_processor_of_another_kind_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    folder = tiny_models.checkpoint("llava", tmp_path)
    path = folder / "processor_config.json"
    document = json.loads(path.read_text())
    document["image_processor"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match=message):
        family_for(open_checkpoint(folder)).image()


def test_settings_that_are_left_out_are_the_classes_own(tmp_path: Path) -> None:
    """Published ViT captioners name a size and nothing else."""
    folder = tiny_models.checkpoint("vit-gpt2", tmp_path)
    (folder / "preprocessor_config.json").write_text(
        '{"feature_extractor_type": "ViTFeatureExtractor", "size": 32}'
    )
    family = family_for(open_checkpoint(folder))
    image = family.image()
    assert image is not None
    assert (image["resample"], image["mean"], image["std"]) == ("bilinear", [0.5] * 3, [0.5] * 3)


def test_decoder_start_and_source_rows_of_a_captioner(tiny_checkpoint: Callable[..., Path]) -> None:
    family = family_for(open_checkpoint(tiny_checkpoint("vit-gpt2")))
    end = family.checkpoint.tokenizer.eos_token_id
    assert family.text() == {"image_token_id": None, "image_rows": 17, "decoder_start_token_id": end}
    assert family.encoder() is None and family.max_source(512) == 17
    assert family_for(open_checkpoint(tiny_checkpoint("blip2-opt"))).max_source(512) is None
    assert family_for(open_checkpoint(tiny_checkpoint("t5"))).max_source(512) == 512
